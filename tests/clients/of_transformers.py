"""transformers: masks of attention by vmap, and per-example gradients of a small Llama."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask


def make():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).eval()
    params = {name: p.detach() for name, p in model.named_parameters()}
    tokens = torch.randint(64, (6, 12))

    def near(batch, head, query, key):
        return (query - key).abs() <= 3 + head

    def loss(params, tokens):
        given = dict(input_ids=tokens[None], labels=tokens[None])
        return torch.func.functional_call(model, params, (), given).loss

    def run():
        mask = sdpa_mask(
            batch_size=2,
            q_length=16,
            kv_length=16,
            mask_function=and_masks(causal_mask_function, near),
            allow_is_causal_skip=False,
            use_vmap=True,
        )
        return [mask, torch.func.vmap(torch.func.grad(loss), (None, 0))(params, tokens)]

    return run
