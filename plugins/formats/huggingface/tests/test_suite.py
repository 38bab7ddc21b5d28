"""The formats of Hugging Face's libraries pass the suite for formats."""

import json
import subprocess
import sys
from pathlib import Path

from tiny_models import DECODER

from mplug_testing import FormatSuite


class TestHuggingFace(FormatSuite):
    plugin = "huggingface"
    settings = {"model.name": "llama", **DECODER}


class TestPEFT(FormatSuite):
    plugin = "peft"
    writes_models = False


SCRIPT = """
import sys
from mplug.cli import main
try:
    main(["config", "show", "--pretrained", sys.argv[1]], prog_name="mplug")
except SystemExit as end:
    print("status", end.code, sorted({"torch", "numpy", "safetensors"} & set(sys.modules)))
"""


def test_reading_the_settings_of_a_folder_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    shown = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "status 0 []"
    assert "num_layers: 32" in shown.stdout
