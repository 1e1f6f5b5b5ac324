r"""Writes the hidden states of a target that runs in vLLM, one file for each request. vLLM's own process imports this.

    PYTHONPATH=training/vllm_side python -m vllm.entrypoints.openai.api_server --model TARGET \
        --tensor-parallel-size N --no-enable-prefix-caching \
        --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33, 36]}}}' \
        --kv-transfer-config '{"kv_connector": "HiddenStateFiles", "kv_role": "kv_producer",
            "kv_connector_module_path": "hidden_state_files",
            "kv_connector_extra_config": {"shared_storage_path": "states"}}'

It needs nothing of this project, so the file may also be copied to where vLLM runs. It is vLLM's own
`ExampleHiddenStatesConnector` with another way to write. That one copies into pinned memory through CUDA streams, which
a CPU does not have, leaves lock files, and does not say what is in a file. Here tensor-parallel rank 0 copies as
torch does on any device, and a file is whole or not there. States keep the dtype in which vLLM computes them. Tried
with vLLM 0.32.0 on a CPU, in fp32 and bf16, and with two tensor-parallel processes; not on a GPU.

A file holds `hidden_states` [T,layers,H] and `token_ids` [T], as vLLM's own do, and under `specdec` in its header what
they are: see `about`. State i is the input of layer i, and the last is the output of the last layer, before the norm.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import vllm
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


@dataclass
class Save(example.PendingSave):
    """A finished request, on its way from the scheduler to the workers."""

    next_token: int | None = None  # the target's next token, if the request was greedy


class HiddenStateFiles(example.ExampleHiddenStatesConnector):
    """Write the hidden states of each request of vLLM to a file."""

    def __init__(self, vllm_config, role, kv_cache_config):
        """Set up the connector without vLLM's lock files."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.use_lock = False
        self.sent: set[str] = set()  # requests whose states are copied, and whose end vLLM has not reported yet

    # In the scheduler

    def request_finished(self, request, block_ids: list[int]):
        """Store the target's next token with a finished greedy request."""
        delayed, params = super().request_finished(request, block_ids)
        if delayed:
            pending = self._pending_saves[request.request_id]
            following = list(request.all_token_ids)[len(pending.token_ids) :]
            sampling = request.sampling_params
            greedy = sampling is not None and sampling.temperature == 0
            self._pending_saves[request.request_id] = Save(
                **vars(pending), next_token=int(following[0]) if greedy and following else None
            )
        return delayed, params

    # In the workers

    def get_finished(self, finished_req_ids: set[str]):
        """Return finished requests, whose blocks vLLM then frees. Their states are copied, and are written soon."""
        if self.has_connector_metadata():
            for pending in self._get_connector_metadata().pending_saves:
                if self._is_tp_rank_zero:
                    states = self._states(pending)
                    self._executor.submit(write, Path(pending.filename), pending, states, self.about(states))
                    self.sent.add(pending.req_id)
        done = finished_req_ids & self.sent
        self.sent -= done
        return done or None, None

    def _states(self, pending) -> torch.Tensor:
        """[T,layers,H] on the CPU. vLLM keeps them as [blocks,layers,block,H]."""
        place = torch.arange(len(pending.token_ids))
        blocks = torch.tensor(pending.block_ids)[place // self._block_size].to(self._kv_cache.device)
        inside = (place % self._block_size).to(self._kv_cache.device)
        return self._kv_cache[blocks, :, inside].cpu().contiguous()

    def about(self, states: torch.Tensor) -> dict:
        """Fields that describe a file, for its header."""
        config, target = self._vllm_config, self._vllm_config.model_config
        layers = config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        text = target.hf_text_config
        return {
            "layers": sorted(set(layers)),  # the order in which vLLM keeps them, whatever it was given
            "of_layers": text.num_hidden_layers,
            "hidden": text.hidden_size,
            "vocab": text.vocab_size,
            "dtype": str(states.dtype).removeprefix("torch."),
            "model": str(target.model),
            "vllm": getattr(vllm, "__version__", "unknown"),
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
        }


def write(path: Path, pending: Save, states: torch.Tensor, about: dict) -> None:
    """Write a file under another name, and give it its own when it is on the disk."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids}
        save_file(tensors, staging, {"specdec": json.dumps(about | {"next_token": pending.next_token})})
        staging.replace(path)
    except Exception as error:  # a thread's would be lost
        example.logger.error("%s was not written: %r", path, error)
        staging.unlink(missing_ok=True)
