"""Images in rows: what is read, what is refused, and the positions of their tokens."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from llmtrain.data import NO_TARGET, BatchLoader, prepare
from llmtrain.data import images as module
from llmtrain.data.images import decode_image
from llmtrain.errors import DataError
from tests.helpers.image_chats import data_url, image_recipe, image_rows, picture, png, save_image_model
from tests.helpers.traces import plan_of

ANSWER = {"role": "assistant", "content": "Yes."}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_image_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


def _row(*parts: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}, ANSWER], **columns}


def _image(**values: Any) -> dict[str, Any]:
    return {"type": "image", **values}


def _gif(width: int, height: int) -> str:
    return "data:image/gif;base64," + _encoded(Image.new("L", (width, height)), "GIF")


def _encoded(image: Image.Image, kind: str) -> str:
    import base64

    buffer = io.BytesIO()
    image.save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


FAULTS = {
    "on the network; download it": _row(_image(url="https://example.org/cat.png")),
    "cannot be read: No such file": _row(_image(path="missing.png")),
    "cannot be decoded": _row(_image(base64="bm90IGFuIGltYWdl")),
    "is not base64": _row(_image(base64="!")),
    "formats are PNG, JPEG": _row(_image(url="data:image/tiff;base64," + _encoded(picture(0, 8, 8), "TIFF"))),
    "pixels, more than": _row(_image(url=_gif(60, 60))),
    "1 parts stand for images of the column of images, which has 0": _row(_image()),
    "0 parts stand for images of the column of images, which has 1": _row(images=[data_url(picture(0, 8, 8))]),
    "only messages of system and user and tool may": {
        "messages": [ANSWER | {"role": "user"}, {"role": "assistant", "content": [_image(path="a.png")]}]
    },
    "which is reserved": {"messages": [{"role": "user", "content": "\ufdd0"}, ANSWER]},
    "is refused: absolute aspect ratio": _row(_image(url=data_url(picture(0, 600, 2)))),
}


def test_each_fault_is_shown_with_its_row(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_PIXELS", 3000)
    good = image_rows(tmp_path, 2)
    for message, row in FAULTS.items():
        with pytest.raises(DataError) as caught:
            prepare(image_recipe(model, tmp_path, [*good, row]))
        assert "rows.jsonl, line 3: " in str(caught.value), message
        assert message in str(caught.value)
    prepared = prepare(image_recipe(model, tmp_path, [*good, *FAULTS.values()], **{"data.faulty_rows": "drop"}))
    chats = prepared.sources[0].store.meta["conversations"]
    assert (chats["kept"], chats["faulty"]) == (2, len(FAULTS))


def test_what_llama_4_needs_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    llama = save_image_model(tmp_path / "llama", "llama4")
    with pytest.raises(DataError, match=r"images of 'llama4' need torchvision(?s:.*)pip install torchvision"):
        prepare(image_recipe(llama, tmp_path, image_rows(tmp_path, 2)))


def test_images_are_never_dropped_for_a_text_model(model, tmp_path):
    fields = {"model.images": False, "data.faulty_rows": "drop"}
    with pytest.raises(DataError, match=r"(?s)rows.jsonl, line 2 has images.*--set model.images=true"):
        prepare(image_recipe(model, tmp_path, image_rows(tmp_path, 4), **fields))


def test_a_store_has_the_images_of_parquet_bit_for_bit(model, tmp_path):
    pictures = [png(picture(number, 24, 40)) for number in range(3)]
    rows = [
        {
            "messages": [
                {"role": "user", "content": [_image(), {"type": "text", "text": "?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
            ],
            "images": [{"bytes": content, "path": None}],
        }
        for content in pictures
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    recipe = image_recipe(model, tmp_path, [], **{"data.sources": [{"name": str(tmp_path / "rows.parquet")}]})
    prepared = prepare(recipe)
    stored = prepared.sources[0].store.streams["train"].images
    assert stored is not None
    found = stored.read(0, len(prepared.sources[0].store.streams["train"]))
    assert [content for _, content in found] == pictures
    changed = prepared.sources[0].store.path / "train_images.bin"
    changed.write_bytes(bytes(len(changed.read_bytes())))
    with pytest.raises(DataError, match="are not those that were written"):
        BatchLoader.of(plan_of(recipe.with_(**{"batch.global_batch_size": 1}), 1), prepare(recipe), 0).train_batch(0)


def test_image_tokens_are_no_labels_and_a_cut_leaves_out_later_images(model, tmp_path):
    image = _image(url=data_url(picture(0, 48, 48)))
    turns = [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}, ANSWER]
    fields = {"data.train_on": "all", "data.too_long": "cut_turns", "data.sequence_length": 80}
    recipe = image_recipe(model, tmp_path, [{"messages": turns * 3}], **fields, **{"batch.global_batch_size": 1})
    prepared = prepare(recipe)
    stream = prepared.sources[0].store.streams["train"]
    assert stream.images is not None
    assert len(stream.images.tokens) == 2
    tokens, mask = np.asarray(stream.tokens), np.asarray(stream.loss_mask)
    assert prepared.images is not None
    assert (tokens == prepared.images.token).sum() == 2 * 9
    assert not mask[tokens == prepared.images.token].any()
    assert mask.sum() == len(tokens) - 2 * 9
    (batch,) = BatchLoader.of(plan_of(recipe, 1), prepared, 0).train_batch(0).micro_batches
    assert batch.images is not None
    assert batch.images.inputs["image_grid_thw"].tolist() == [[1, 6, 6]] * 2
    assert not ((batch.labels == prepared.images.token) & (batch.labels != NO_TARGET)).any()


def test_an_image_is_turned_as_its_metadata_say():
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(0, 30, 20).save(buffer, "JPEG", exif=exif)
    assert decode_image(buffer.getvalue()).size == (20, 30)
