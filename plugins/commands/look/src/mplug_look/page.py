"""The HTML page of samples. It loads nothing: styles and pictures are inside."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape

from torch import Tensor

from mplug import counted
from mplug_look.samples import Piece, Sample

MOST_FRAMES = 8
"""Maximum number of frames of a medium that the page shows."""
STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
h2 { font-size: 1em; border-top: 1px solid #ddd; padding-top: 1em; margin-top: 2em }
.text { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.target { background: #b9e8b9 }
.token { background: #eee; color: #666; border-radius: 4px; padding: 0 .3em; font-size: .85em }
.target.token { background: #8fd48f; color: #222 }
.label { background: #ffd9b0; border-radius: 4px; padding: 0 .3em; font-size: .85em }
.document { display: block; border-top: 1px dashed #999; color: #999; font-size: .8em }
img { min-height: 4em; max-width: 100%; vertical-align: middle; border: 1px solid #999; image-rendering: pixelated }
td { padding: 0 1em 0 0; font-family: ui-monospace, monospace; font-size: .85em }
"""
LEGEND = (
    '<p><span class="target">Targets</span> are what the model learns to predict; other tokens are only read. '
    '<span class="token">&lt;7&gt;</span> is a token without a text, <span class="token">&lt;7&gt; × 9</span> the same '
    'token nine times. A picture stands where its tokens are. <span class="label">&lt;7&gt;</span> is a target that is '
    "not the next token. Point at a token for its position and number.</p>"
)


def page_of(title: str, origin: str, samples: Sequence[Sample], entries: Mapping[str, str]) -> str:
    """A page with these samples. `entries` describes the entries of their micro batch."""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in entries.items())
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1><p>{escape(origin)}</p>\n{LEGEND}\n"
        + "\n".join(map(_section, samples))
        + f"\n<h2>Entries of a micro batch</h2><table>{rows}</table></body></html>\n"
    )


def _section(sample: Sample) -> str:
    heading = f"Sample {sample.number}: {counted(sample.length, 'token')}, {counted(sample.targets, 'target')}"
    sizes = [f"{one.shape[2]} × {one.shape[1]}{_frames(one)}" for one in sample.media]
    heading += f", pictures: {', '.join(sizes)}" if sizes else ""
    pieces = "".join(_piece(piece, sample.media) for piece in sample.pieces)
    return f'<section><h2>{heading}</h2>\n<div class="text">{pieces}</div></section>'


def _frames(medium: Tensor) -> str:
    return f" × {len(medium)} frames" if len(medium) > 1 else ""


def _piece(piece: Piece, media: Sequence[Tensor]) -> str:
    tokens, last = piece.tokens, piece.start + len(piece.tokens) - 1
    positions = f"{piece.start}" if last == piece.start else f"{piece.start} to {last}"
    title = f"position {positions}: {', '.join(map(str, dict.fromkeys(tokens)))}"
    before = '<span class="document">document</span>' if piece.begins_document else ""
    if piece.label is not None:
        before += f'<span class="label" title="target of the position before">{_chip(piece.label, 1)}</span>'
    if piece.medium is not None:
        return before + _pictures(media[piece.medium], f"{title} ({counted(len(tokens), 'token')})")
    is_repeated = len(set(tokens)) == 1 and len(tokens) > 1
    is_chip = not piece.text or is_repeated
    classes = [*(["target"] if piece.is_target else []), *(["token"] if is_chip else [])]
    shown = escape(piece.text or "").replace("\n", "↵\n")
    if is_chip:
        shown = f"{shown} × {len(tokens)}" if shown and is_repeated else shown or _chip(tokens[0], len(tokens))
    named = f' class="{" ".join(classes)}"' if classes else ""
    return f'{before}<span{named} title="{title}">{shown}</span>'


def _chip(token: int, number: int) -> str:
    return f"&lt;{token}&gt;" + (f" × {number}" if number > 1 else "")


def _pictures(medium: Tensor, title: str) -> str:
    """The frames of a medium as pictures inside the page."""
    shown = "".join(f'<img alt="{title}" title="{title}" src="{_source(frame)}">' for frame in medium[:MOST_FRAMES])
    missing = len(medium) - MOST_FRAMES
    return shown + (f'<span class="token">{missing} more frames</span>' if missing > 0 else "")


def _source(frame: Tensor) -> str:
    """A frame [H, W, 3] as the address of a PNG that contains its bytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame.numpy(), "RGB").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
