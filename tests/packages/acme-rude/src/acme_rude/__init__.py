"""What a script does, in a package."""

import sys

print("acme_rude was imported")
sys.exit(0)
