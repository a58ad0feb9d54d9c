# SPDX-License-Identifier: Apache-2.0
"""from_pretrained with a LowbitConfig never leaves a whole model float without a word: it refuses, by name, or warns."""

from __future__ import annotations

import copy
import json
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from tiny_models import MODELS, logits, save
from torch import nn

import lowbit

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

W4A8 = lowbit.int8_dynamic_activation_int4_weight()
CONFIG = lowbit.LowbitConfig(W4A8)
RANKS = 2


def packed(model: nn.Module) -> int:
    return sum(isinstance(module, (lowbit.QuantLinear, lowbit.QuantEmbedding)) for module in model.modules())


def packed_folder(folder: Path) -> Path:
    model = transformers.LlamaForCausalLM(copy.deepcopy(MODELS["llama"][1]))
    lowbit.quantize_(model, W4A8)
    model.save_pretrained(folder / "packed")
    return folder / "packed"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def sharded(rank: int, port: int, folder: str) -> None:
    """Every way to cut a model among two ranks is refused, of a float checkpoint and of a packed one, and loads nothing."""
    import os

    from transformers.distributed import DistributedConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    ways: list[dict[str, Any]] = [
        {"tp_plan": "auto"},
        {"tp_size": 2},
        {"distributed_config": DistributedConfig(tp_size=2)},
        {"distributed_config": DistributedConfig(fsdp_size=2)},
    ]
    folders = {"float": {"quantization_config": CONFIG}, "packed": {}}
    for name, more in folders.items():
        for way in ways:
            # A file without its weights: they are not asked for.
            with pytest.raises(NotImplementedError, match=r"from_pretrained: tp_plan, tp_size and distributed_config must be left out .* got (tp|dp)_size=2"):
                transformers.LlamaForCausalLM.from_pretrained(Path(folder, name), **more, **copy.deepcopy(way))
    mesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
    for way in ({"distributed_config": DistributedConfig(tp_size=1)}, {"device_mesh": mesh}):  # nothing is cut
        model = transformers.LlamaForCausalLM.from_pretrained(Path(folder, "whole"), quantization_config=CONFIG, **way)
        assert packed(model) == 15
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is not available")
def test_a_model_that_is_cut_among_processes_is_refused_before_it_is_read(tmp_path):
    save("llama", tmp_path)
    packed_folder(tmp_path)
    save("llama", tmp_path / "again")
    (tmp_path / "again" / "float").rename(tmp_path / "whole")
    for name in ("float", "packed"):
        (tmp_path / name / "model.safetensors").unlink()
    mp.spawn(sharded, args=(free_port(), str(tmp_path)), nprocs=RANKS, join=True)


@pytest.mark.parametrize(
    ("name", "config", "match"),
    [
        ("llama", lowbit.LowbitConfig(W4A8, ["model", "lm_head"], head=None), "model.layers.0.mlp.up_proj: named by modules_to_not_convert"),
        ("llama", lowbit.LowbitConfig(plan={"lm_head": None}), "no format is named for it"),
        ("tied", lowbit.LowbitConfig(W4A8, ["model", "lm_head"]), "lm_head: its weight is tied"),
        ("tied", lowbit.LowbitConfig(embeddings=W4A8, plan={"lm_head": None}), "model.embed_tokens: lm_head is to stay float"),
    ],
)
def test_a_configuration_that_packs_nothing_is_refused(name, config, match, tmp_path):
    folder = save(name, tmp_path)
    with pytest.raises(ValueError, match=rf"LowbitConfig: no layer of the model would be packed: .*{match}"):
        MODELS[name][0].from_pretrained(folder, quantization_config=config)
    with pytest.raises(ValueError, match="LowbitConfig: no layer of the model would be packed"):
        lowbit.quantize_checkpoint(folder, tmp_path / "out", config.config, plan=config.plan, modules_to_not_convert=config.modules_to_not_convert, embeddings=config.embeddings, head=config.head)
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_without_any_of_the_weights_is_refused(tmp_path):
    folder = save("llama", tmp_path)
    file = folder / "model.safetensors"
    state = {name: tensor for name, tensor in safetensors.load_file(file).items() if "norm" in name}
    safetensors.save_file(state, file, {"format": "pt"})
    with pytest.raises(ValueError, match="from_pretrained: no weight of the checkpoint was packed: .*its weight is not in the checkpoint"):
        transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=CONFIG)


def test_float_files_beside_an_entry_load_with_a_warning(tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    wanted = logits(cls.from_pretrained(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG.to_dict()}))
    with pytest.warns(UserWarning, match="says that lowbit packed the weights, and no file holds a packed one"):
        loaded = cls.from_pretrained(folder)
    assert not packed(loaded) and torch.equal(logits(loaded), wanted)
    assert not hasattr(loaded.config, "quantization_config") and getattr(loaded, "hf_quantizer", None) is None
    with pytest.warns(UserWarning, match="no file holds a packed one"):  # the config of a model has an object there
        assert not packed(cls.from_pretrained(folder, config=cls.from_pretrained(packed_folder(tmp_path)).config))
    loaded.save_pretrained(tmp_path / "again")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits(cls.from_pretrained(tmp_path / "again")), wanted)


def test_a_folder_loads_by_the_config_of_a_packed_model(tmp_path):
    loaded = transformers.LlamaForCausalLM.from_pretrained(packed_folder(tmp_path))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "packed", config=loaded.config)
    assert packed(again) == 15 and torch.equal(logits(again), logits(loaded))


def test_every_other_way_to_give_weights_packs_them(tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    model = cls.from_pretrained(folder)
    wanted = cls.from_pretrained(folder, quantization_config=CONFIG)
    (tmp_path / "bin").mkdir()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_text((folder / "config.json").read_text())
    ways = {
        "a file of torch.save": (tmp_path / "bin", {}),
        "a state dict": (None, {"state_dict": model.state_dict(), "config": copy.deepcopy(model.config)}),
        "a config": (folder, {"config": copy.deepcopy(model.config)}),
        "a map of devices": (folder, {"device_map": {"": "cpu"}}),
        "a dtype": (folder, {"dtype": torch.float32}),
    }
    for config in (CONFIG, CONFIG.to_dict()):
        for way, (place, more) in ways.items():
            loaded = cls.from_pretrained(place, quantization_config=config, **more)
            assert packed(loaded) == packed(wanted) == 15, way
            assert torch.equal(logits(loaded), logits(wanted)), way
