"""nn.MultiheadAttention and nn.TransformerEncoderLayer in evaluation mode, where PyTorch fuses
their operators.
"""

import pytest
import torch
from device_loop import empty_device
from torch import nn

import memcallback as mc

BATCH, LENGTH = 8, 512


class Attends(nn.Module):
    def __init__(
        self,
        size=256,
        heads=4,
        need_weights=False,
        pads=False,
        is_causal=False,
        is_transposed=False,
    ):
        super().__init__()
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True)
        self.size, self.need_weights = size, need_weights
        self.pads, self.is_causal, self.is_transposed = pads, is_causal, is_transposed

    def forward(self, x):
        x = x.mT.contiguous().mT if self.is_transposed else x
        length, masks = x.shape[1], {"need_weights": self.need_weights}
        if self.pads:
            masks["key_padding_mask"] = x.new_zeros(x.shape[:2], dtype=torch.bool)
        if self.is_causal:
            ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
            masks["attn_mask"] = ones.triu(1)
        return self.attention(x, x, x, **masks)[0]


class Encodes(nn.Module):
    def __init__(self, num_layers=None, is_causal=False, is_transposed=False, **options):
        super().__init__()
        self.size = 256
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, **options)
        self.layer = layer if num_layers is None else nn.TransformerEncoder(layer, num_layers)
        self.is_causal, self.is_transposed = is_causal, is_transposed

    def forward(self, x):
        x = x.mT.contiguous().mT if self.is_transposed else x
        mask = None
        if self.is_causal:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.layer(x, mask, is_causal=self.is_causal)


def predicted(model, device, mode="inference_mode", dtype=torch.float32):
    batch = torch.zeros(BATCH, LENGTH, getattr(model, "size", 256), dtype=dtype)
    step = mc.InferenceStep(model.eval(), batch, mode=mode, keep_outputs="none")
    return mc.predict(step, device=device)


MODELS = {
    "attention": (Attends, {}),
    "attention with weights": (Attends, {"need_weights": True}),
    "attention with padding": (Attends, {"pads": True}),
    "causal attention": (Attends, {"is_causal": True}),
    "causal attention with padding": (Attends, {"pads": True, "is_causal": True}),
    "masks and weights": (Attends, {"pads": True, "is_causal": True, "need_weights": True}),
    "layer": (Encodes, {}),
    "layer with norms first": (Encodes, {"norm_first": True, "activation": "gelu"}),
    "causal layer": (Encodes, {"is_causal": True}),
    "encoder": (Encodes, {"num_layers": 3}),
    "attention of a transposed batch": (Attends, {"is_transposed": True}),
    "attention with weights, transposed": (Attends, {"is_transposed": True, "need_weights": True}),
    "encoder of a transposed batch": (Encodes, {"num_layers": 2, "is_transposed": True}),
    "norms first, transposed": (Encodes, {"norm_first": True, "is_transposed": True}),
    "an odd number of heads": (Attends, {"size": 240, "heads": 3}),
    "heads of no multiple of 8": (Attends, {"size": 240, "heads": 20}),
}


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:Converting mask without torch.bool dtype")
def test_what_a_pass_takes_is_predicted_to_the_byte(name, dtype, mode):
    kind, options = MODELS[name]
    empty_device()
    model = kind(**options).to(dtype).cuda().eval()
    modes = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}
    for _ in range(4):  # the second one differs by a rounding
        batch = torch.zeros(BATCH, LENGTH, model.size, dtype=dtype).cuda()
        torch.cuda.reset_peak_memory_stats()
        with modes.get(mode, torch.enable_grad)():
            outputs = model(batch)
        peak = torch.cuda.max_memory_allocated()
        del batch, outputs
    prediction = predicted(model, "cuda", mode, dtype)
    assert prediction.peak_allocated_bytes == peak
    assert prediction.peak_reserved_bytes == torch.cuda.memory_reserved()


def test_what_needs_gradients_is_not_fused():
    fused, plain = (predicted(Encodes(), "H200", mode) for mode in ("no_grad", "grad"))
    assert fused.peak_allocated_bytes < plain.peak_allocated_bytes


def test_an_encoder_that_may_leave_out_padding_has_a_caveat():
    class Pads(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(256, 4, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x):
            is_padding = x.new_zeros(x.shape[:2], dtype=torch.bool)
            return self.encoder(x, src_key_padding_mask=is_padding)

    def caveats(model):
        return [one for one in predicted(model, "H200").caveats if "padding" in one]

    (caveat,) = caveats(Pads())
    assert caveat.startswith("nn.TransformerEncoder is predicted with the padding of its batch.")
    assert not caveats(Encodes(num_layers=2))
