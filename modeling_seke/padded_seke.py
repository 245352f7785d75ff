# SPDX-License-Identifier: Apache-2.0
"""SEKE on a padded batch, for export to ONNX: no shape depends on the data, and every operation is a standard one.

Letters as in `layers_seke`. Equal in values to the packed head in evaluation mode, wherever the padding is: tokens are moved to the
beginning of their rows before the recurrent encoder, which reads as many of each row as are real, and back after it.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

OPSET = 22  # of ONNX; onnxruntime 1.20 or later


class PaddedSeke(nn.Module):
    """The logits of a `SekeForTokenClassification` and the backbone's last states, from tensors to tensors.

    Args:
        model: the model, in evaluation mode.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.inputs = ["input_ids", "attention_mask"]
        self.inputs += ["token_type_ids"] * model._takes_token_type_ids + ["style_ids"] * bool(model.config.styles)
        self.experts = None if model.moe is None else DenseExperts(model.moe.experts)
        self.recurrent = None if model.rnn is None else OnnxRecurrent(model.rnn.recurrent)

    def forward(self, input_ids, attention_mask, *others):
        """Runs the model.

        Args:
            input_ids, attention_mask (`(B, S)`): int64.
            others: `token_type_ids` (`(B, S)`) and `style_ids` (`(B,)`), those of `inputs`.

        Returns:
            Logits `(B, S, C)` and the backbone's last states `(B, S, d)`.
        """
        model, others = self.model, dict(zip(self.inputs[2:], others, strict=True))
        style_ids = others.pop("style_ids", None)
        outputs = model.backbone(input_ids, attention_mask=attention_mask, return_dict=True, **others)
        states = y = outputs.last_hidden_state  # (B, S, d)
        if style_ids is not None:
            y = y + model.style_embedding(style_ids)[:, None]
        if model.moe is not None:
            y = self.mix_experts(y)
        if model.rnn is not None:
            y = self.add_recurrent(y, attention_mask)
        logits = model.classifier(y)
        return torch.where(attention_mask[:, :, None] != 0, logits, 0.0), states

    def mix_experts(self, x: torch.Tensor) -> torch.Tensor:
        """sum_e G(x)_e E_e(x), with G(x)_e = 0 for experts that were not chosen: (B, S, d) -> (B, S, d)."""
        _, weights, index = self.model.moe.router(x)  # (B, S, k)
        gates = (weights[..., None] * F.one_hot(index, self.experts.num_experts)).sum(-2)  # (B, S, E)
        return self.experts(x, gates)

    def add_recurrent(self, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """y + (h_forward + h_backward) over the real tokens of each row: (B, S, d), (B, S) -> (B, S, d)."""
        real = (mask != 0).long()
        lengths = real.sum(1, keepdim=True)  # (B, 1)
        place = torch.where(real == 1, real.cumsum(1) - 1, lengths + (1 - real).cumsum(1) - 1)  # (B, S), a permutation
        positions = torch.arange(mask.shape[1], device=mask.device).expand_as(place)
        source = torch.zeros_like(place).scatter(1, place, positions)  # its inverse: real tokens first
        h = self.recurrent(take_tokens(y, source), lengths.squeeze(1).clamp(min=1))
        forward, backward = take_tokens(h, place).chunk(2, dim=-1)
        return y + (forward + backward)


def take_tokens(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[b, index[b, s]] as a selection of whole rows, which runtimes copy faster than single elements: (B, S, d), (B, S) -> (B, S, d)."""
    first = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1)[(first + index).flatten()].view_as(x)


class DenseExperts(nn.Module):
    """sum_e G_e (ReLU(x U_e + a_e) M_e + n_e), every expert on every token, as two products   (SEKE Sect. 3.1, without dropout)

    Without dropout an expert's last two layers are one linear layer: M_e = V_e W_e, n_e = b_e W_e + c_e. The
    gate scales the hidden units of its expert, and the second product adds up the experts. The weights are copies in the layout
    of the graph: quantisers look for constants.

    Args:
        experts: the `SekeExperts`.
    """

    def __init__(self, experts):
        super().__init__()
        U, a, V, b, W, c = (weight.detach().double() for weight in experts.stacked_weights())
        self.num_experts, width, d = U.shape
        self.up, self.down = nn.Linear(d, self.num_experts * width), nn.Linear(self.num_experts * width, d, bias=False)
        self.up.weight.data, self.up.bias.data = U.flatten(0, 1).float(), a.flatten().float()
        self.down.weight.data = (W @ V).transpose(0, 1).flatten(1).contiguous().float()  # (d, E I)
        self.register_buffer("bias", ((W @ b[:, :, None]).squeeze(2) + c).float())  # (E, d)

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """(B, S, d), gates (B, S, E) -> (B, S, d)."""
        h = F.relu(self.up(x)).unflatten(-1, (self.num_experts, -1))  # (B, S, E, I)
        return self.down((h * gates[..., None]).flatten(2)) + gates @ self.bias


class OnnxRecurrent(nn.Module):
    """ONNX's bidirectional LSTM or GRU, layer on layer, with the weights of PyTorch's. Outside an export it runs PyTorch's.

    Args:
        recurrent: a bidirectional `nn.LSTM` or `nn.GRU`.
    """

    def __init__(self, recurrent: nn.LSTM | nn.GRU):
        super().__init__()
        self.recurrent = recurrent
        self.operator = "LSTM" if isinstance(recurrent, nn.LSTM) else "GRU"
        self.hidden_size, self.num_layers = recurrent.hidden_size, recurrent.num_layers
        for layer in range(self.num_layers):
            both = [onnx_weights(*recurrent.all_weights[2 * layer + direction]) for direction in range(2)]
            for name, pair in zip("WRB", zip(*both, strict=True), strict=True):
                self.register_buffer(f"{name}{layer}", torch.stack(pair).detach())  # (2, 4d, in), (2, 4d, d), (2, 8d)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Reads the first `lengths` steps of each row: (B, S, d), (B,) -> (B, S, 2d)."""
        if not torch.onnx.is_in_onnx_export():
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=x.shape[1])[0]
        for layer in range(self.num_layers):
            x = self.run(x, [getattr(self, f"{name}{layer}") for name in "WRB"], lengths.to(torch.int32))
        return x

    def run(self, x: torch.Tensor, weights: list[torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
        """One layer of two directions: (B, S, in) -> (B, S, 2d)."""
        attributes: dict = {"hidden_size": self.hidden_size, "direction": "bidirectional"}
        if self.operator == "GRU":
            attributes["linear_before_reset"] = 1  # as PyTorch defines it
        shape = [x.shape[1], 2, x.shape[0], self.hidden_size]
        inputs = [x.transpose(0, 1), *weights, lengths]
        y = torch.onnx.ops.symbolic(self.operator, inputs, attributes, dtype=x.dtype, shape=shape, version=OPSET)
        return y.permute(2, 0, 1, 3).flatten(2)  # from (S, 2, B, d)


def onnx_weights(w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor, b_hh: torch.Tensor) -> tuple:
    """One direction's weights with the gates in ONNX's order: input, output, forget, cell; for a GRU update, reset, new."""
    d = w_hh.shape[1]
    order = (0, 3, 1, 2) if len(w_hh) == 4 * d else (1, 0, 2)
    W, R, b, c = (torch.cat([w.split(d)[gate] for gate in order]) for w in (w_ih, w_hh, b_ih, b_hh))
    return W, R, torch.cat([b, c])
