"""The tokenizer of a corpus, by its name and by the record beside the data, for authors of data plugins.

This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_tokenization.chat_loader import ChatLoader as ChatLoader
    from mplug_tokenization.contract import CorpusTokenizer as CorpusTokenizer
    from mplug_tokenization.contract import FolderTokenizer as FolderTokenizer
    from mplug_tokenization.contract import Tokenizer as Tokenizer
    from mplug_tokenization.folders import folder_tokenizer as folder_tokenizer
    from mplug_tokenization.records import TokenizerRecord as TokenizerRecord
    from mplug_tokenization.records import describe_tokenizer as describe_tokenizer
    from mplug_tokenization.records import keep_tokenizer as keep_tokenizer
    from mplug_tokenization.records import load_tokenizer as load_tokenizer
    from mplug_tokenization.records import read_tokenizer as read_tokenizer

publish(__name__)
