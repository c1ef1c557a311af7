"""Sample completions with one CUDA graph per token, for small models whose sampling is bound by kernel launches.

`generate` of transformers launches several hundred kernels from Python for each token, which takes longer than the GPU
needs to run them. Here a whole step, the forward pass, the draw of a token and the bookkeeping, is recorded once and
replayed. Three things more make a step shorter: a prompt with several completions is read once, autocast's 16-bit
weights are made once per batch and not per token, and heads that share keys are attended to as one. The samples come
from the same distribution; on the CPU, the step runs as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PLACES = 16
"""Prompts are padded to a multiple of this, so that few graphs serve all batches."""
STEPS_BETWEEN_CHECKS = 4
"""Asking whether all completions have ended waits for the GPU, so it is not done at every token."""


def install(trainer: Any) -> None:
    """Let the trainer's model generate by `GraphSampler`; what TRL does with the result stays as it is."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
    trainer.model.generate = GraphSampler(trainer.model, half).generate


def shared_keys_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention of one new token, without a copy of the keys for each of the heads that share them."""
    rows, heads, tokens, size = query.shape
    if tokens > 1:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    # Heads that share keys have neighbouring numbers. They become tokens of one head, which all see the same places.
    together = query.reshape(rows, key.shape[1], -1, size)
    found = nn.functional.scaled_dot_product_attention(together, key, value, attention_mask, scale=scaling)
    return found.reshape(rows, 1, heads, size), None


@contextmanager
def shared_keys(model: Any) -> Iterator[None]:
    """Use `shared_keys_attention` in the model."""
    from transformers import AttentionInterface

    name, before = "shared_keys", model.config._attn_implementation
    AttentionInterface.register(name, shared_keys_attention)
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


class HalfWeights:
    """16-bit copies of the weights that autocast would make at every token, those of linear layers."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        found = {f"{name}.weight": m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        self.weights = list(found.values()) if dtype else []
        self.by_name = {name: w.detach().to(dtype) for name, w in found.items()} if dtype else {}

    def refresh(self) -> None:
        """Copy the present weights, into the same memory."""
        if self.by_name:
            for kept, present in zip(self.by_name.values(), self.weights, strict=True):
                kept.copy_(present)


class FixedCache:
    """Keys and values in buffers of a fixed size: the prompt is written at the start, each token at `place`.

    A prompt with several completions is read once: `source` has the prompt of each row.
    """

    def __init__(self, length: int, place: Tensor) -> None:
        self.length, self.place, self.layers = length, place, {}
        self.source = place.new_empty(0)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; return those that the new tokens may attend to."""
        prompt = key.shape[2]
        if prompt > 1:
            for kept, new in zip(self._buffers(key, value, layer_idx), (key, value), strict=True):
                kept[:, :, :prompt] = new.index_select(0, self.source)
            return key, value
        keys, values = self.layers[layer_idx]
        return keys.index_copy_(2, self.place, key), values.index_copy_(2, self.place, value)

    def _buffers(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Made once, because a recorded graph refers to their addresses."""
        if layer_idx not in self.layers:
            shape = (len(self.source), key.shape[1], self.length, key.shape[3])
            self.layers[layer_idx] = (key.new_zeros(shape), value.new_zeros(shape))
        return self.layers[layer_idx]

    def get_seq_length(self, *args: Any) -> int:
        """Only asked for where positions or masks are missing; here both are given."""
        return 0


class Decoder:
    """The state of one batch shape, and the step that extends every completion by one token."""

    def __init__(
        self, model: Any, half: HalfWeights, rows: int, prompt: int, config: Any, device: torch.device
    ) -> None:
        self.model, self.half, self.prompt, self.config = model, half, prompt, config
        self.new = config.max_new_tokens
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.position = torch.zeros_like(self.token)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.index = torch.zeros_like(self.place)
        self.visible = torch.zeros(rows, 1, 1, prompt + self.new, dtype=torch.bool, device=device)
        self.ended = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        self.made = torch.zeros(rows, self.new, dtype=torch.long, device=device)
        self.logp = torch.zeros(rows, self.new, device=device)
        self.yes = torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=device)
        self.ends = torch.tensor(config.eos_token_id, device=device).view(-1)
        self.cache = FixedCache(prompt + self.new, self.place)
        self.replay: Callable[[], None] | None = None

    def start(self, ids: Tensor, mask: Tensor) -> None:
        """Read the prompts, which are padded on the left, and draw the first tokens."""
        seen = mask.bool()
        self.place.fill_(self.prompt)
        self.index.zero_()
        self.ended.zero_()
        self.made.fill_(self.config.pad_token_id)
        self.visible.zero_()
        self.visible[:, 0, 0, : self.prompt] = seen
        both, self.cache.source = torch.unique(torch.cat([ids, mask], 1), dim=0, return_inverse=True)
        ids, seen = both[:, : self.prompt], both[:, self.prompt :].bool()
        causal = torch.ones(self.prompt, self.prompt, dtype=torch.bool, device=ids.device).tril()
        # Padding attends to itself, because the attention of a row without any visible token is not a number.
        itself = torch.eye(self.prompt, dtype=torch.bool, device=ids.device)
        position = (seen.long().cumsum(1) - 1).clamp(min=0)
        found = self._logits(ids, (causal & seen[:, None, None, :]) | itself, position)
        self.position.copy_(position[self.cache.source, -1:] + 1)
        self._draw(found[self.cache.source])

    def step(self) -> None:
        """Extend every completion by one token."""
        self.visible.index_copy_(3, self.place, self.yes)
        found = self._logits(self.token, self.visible, self.position)
        self.place.add_(1)
        self.position.add_(1)
        self._draw(found)

    def _logits(self, ids: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        given = {"attention_mask": mask, "position_ids": position, "past_key_values": self.cache, "use_cache": True}
        given |= {"input_ids": ids, "logits_to_keep": 1}
        # Tied weights apart: the embedding stays in 32 bits, as in autocast.
        found = torch.func.functional_call(self.model, self.half.by_name, kwargs=given, tie_weights=False)
        return found.logits[:, -1].float()

    def _draw(self, logits: Tensor) -> None:
        """One token of each row; after its end, a row gets padding."""
        if self.config.do_sample:
            logp = (logits / self.config.temperature).log_softmax(-1)
            # The largest of p/e with exponential e is a draw from p: what torch.multinomial computes.
            token = (logp - torch.empty_like(logp).exponential_().log()).argmax(-1, keepdim=True)
        else:
            logp = logits.log_softmax(-1)
            token = logp.argmax(-1, keepdim=True)
        self.logp.index_copy_(1, self.index, logp.gather(1, token))
        token = torch.where(self.ended, self.config.pad_token_id, token)
        self.made.index_copy_(1, self.index, token)
        self.index.add_(1)
        self.ended |= torch.isin(token, self.ends)
        self.token.copy_(token)

    def record(self) -> None:
        """Replace the step by a recorded graph of it. The steps before the recording warm up the libraries."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step()
        self.replay = graph.replay


class GraphSampler:
    """`generate` for a decoder-only model with plain sampling: temperature, but no top-k, top-p or penalties."""

    def __init__(self, model: Any, half: torch.dtype | None = None) -> None:
        self.model, self.decoders = model, {}
        self.dtype, self.half = half, HalfWeights(model, half)
        self.logp: Tensor | None = None
        """Log-probs of the tokens sampled last."""

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor, generation_config: Any, **_: Any) -> Tensor:
        """Prompts with their completions, padded on the right, as transformers returns them."""
        self._require_plain(generation_config)
        short = -input_ids.shape[1] % PLACES
        ids = torch.nn.functional.pad(input_ids, (short, 0), value=generation_config.pad_token_id)
        mask = torch.nn.functional.pad(attention_mask, (short, 0))
        self.half.refresh()
        # Before training begins the model is not prepared for autocast, which the 16-bit weights need.
        half = torch.autocast(ids.device.type, self.dtype, enabled=self.dtype is not None)
        with shared_keys(self.model), half:
            decoder = self._decoder(ids, mask, generation_config)
            decoder.start(ids, mask)
            step = decoder.replay or decoder.step
            for made in range(1, decoder.new):
                if made % STEPS_BETWEEN_CHECKS == 0 and bool(decoder.ended.all()):
                    break
                step()
        count = int(decoder.index)
        self.logp = decoder.logp[:, :count].clone()
        return torch.cat([input_ids, decoder.made[:, :count]], 1)

    def _decoder(self, ids: Tensor, mask: Tensor, config: Any) -> Decoder:
        """The decoder of this shape; on a GPU its first use records the graph, with random numbers of its own."""
        key = (*ids.shape, config.max_new_tokens, config.do_sample, config.temperature)
        if key not in self.decoders:
            rows, prompt = ids.shape
            made = self.decoders[key] = Decoder(self.model, self.half, rows, prompt, config, ids.device)
            if ids.is_cuda:
                before = torch.cuda.get_rng_state()
                made.start(ids, mask)
                made.record()
                torch.cuda.set_rng_state(before)
        return self.decoders[key]

    def _require_plain(self, config: Any) -> None:
        neutral = {"top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None,), "repetition_penalty": (None, 1.0)}
        for name, allowed in neutral.items():
            if getattr(config, name, None) not in allowed:
                raise ValueError(
                    f"expected {name} in {allowed}; got {getattr(config, name)}; use transformers' generate"
                )
