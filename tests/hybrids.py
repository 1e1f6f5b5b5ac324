"""Tiny models with recurrent layers, one of each kind that transformers' modules run exactly, and parts of configs."""

from helpers import save_hf

from specdec.model.hf_target import TransformersTarget
from specdec.model.loader import load_target

LINEAR = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SMALL_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MOE = SMALL_MOE | {"shared_expert_intermediate_size": 16}
SMALL_DEEPSEEK = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
FALCON = {
    "mamba_d_ssm": 96, "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_chunk_size": 16, "pad_token_id": 0,
}  # fmt: skip
HYBRIDS = {
    "qwen3_next": LINEAR | MOE,
    "qwen3_5_text": LINEAR,
    "mamba2": {"state_size": 8, "num_heads": 12, "head_dim": 8, "n_groups": 2, "chunk_size": 16},  # no attention
    "mamba": {"state_size": 8},  # runs over one position at a time only
    "falcon_h1": FALCON,  # attention and a state in the same layer
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "pad_token_id": 0},  # convolutions only
}


def hybrid_target(folder, family: str = "qwen3_next", **fields) -> TransformersTarget:
    """A random one whose next token depends strongly on what it read."""
    save_hf(folder, family, head=15.0, **HYBRIDS[family] | fields)
    return load_target(folder, tokenizer=False)
