"""Stackable layers against PyTorch's own: the same outputs and gradients, for one model and for many."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

from fairwind.layers import CountedRandomness, key_names, stackable, tracing

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
ROWS = 3
Parameters = dict[str, Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def summed(outputs: Any) -> Tensor:
    """A number that depends on every output, and on each differently."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    weights = [torch.arange(leaf.numel(), dtype=leaf.dtype).cos().view(leaf.shape) for leaf in leaves]
    return torch.stack([(leaf.sin() * w).sum() for leaf, w in zip(leaves, weights, strict=True)]).sum()


def check(theirs: nn.Module, *inputs: Any, **named: Any) -> None:
    """What must hold of every layer."""
    theirs = theirs.double()
    for p in theirs.parameters():
        if not p.any():  # biases that start at zero; make them count
            nn.init.normal_(p, std=0.3)
    ours = stackable(copy.deepcopy(theirs))
    assert isinstance(ours, type(theirs))
    check_one_model(theirs, ours, inputs, named)
    check_rows(ours, inputs, named)
    check_state(theirs, ours)


def check_one_model(theirs: nn.Module, ours: nn.Module, inputs: Any, named: Any) -> None:
    for training in (True, False):
        results = []
        for module in (theirs.train(training), ours.train(training)):
            given = [copy.deepcopy(x) for x in inputs]
            floats = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()]
            leaves = [*module.parameters(), *(x.requires_grad_() for x in floats)]
            outputs = module(*given, **named)
            results.append((outputs, torch.autograd.grad(summed(outputs), leaves, allow_unused=True)))
        torch.testing.assert_close(results[0], results[1], **CLOSE)


def check_rows(ours: nn.Module, inputs: Any, named: Any) -> None:
    """Stacked models have the gradients they have one by one, with `grad` inside of `vmap` or outside."""
    ours.train()
    parameters = dict(ours.named_parameters())
    rows = {
        name: torch.stack([p.detach() + 0.1 * normal(*p.shape, seed=i + 10) for i in range(ROWS)])
        for name, p in parameters.items()
    }
    x, *others = inputs
    stacked = torch.stack([x + 0.1 * normal(*x.shape, seed=i + 20) for i in range(ROWS)])

    def loss(row: Parameters, x: Tensor) -> Tensor:
        return summed(functional_call(ours, row, (x, *others), named))

    loop = [grad(loss)({name: p[i] for name, p in rows.items()}, stacked[i]) for i in range(ROWS)]
    expected = {name: torch.stack([row[name] for row in loop]) for name in rows}
    torch.testing.assert_close(vmap(grad(loss))(rows, stacked), expected, **CLOSE)
    torch.testing.assert_close(grad(lambda r: vmap(loss)(r, stacked).sum())(rows), expected, **CLOSE)


def check_state(theirs: nn.Module, ours: nn.Module) -> None:
    state = ours.state_dict()
    assert list(state) == list(theirs.state_dict())
    torch.testing.assert_close(state, theirs.state_dict(), rtol=0, atol=0)
    theirs.load_state_dict(state)


RECURRENT: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}


@pytest.mark.parametrize("options", RECURRENT.values(), ids=RECURRENT)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(kind: str, options: dict[str, Any]) -> None:
    check(getattr(nn, kind)(4, 3, **options), normal(5, 2, 4))
    outputs, state = stackable(getattr(nn, kind)(4, 3, **options).double())(normal(5, 2, 4))
    assert all(x.is_contiguous() for x in tree_leaves((outputs, state)))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_from_given_states_and_for_one_sequence(kind: str) -> None:
    layer = getattr(nn, kind)(4, 3, num_layers=2, bidirectional=True)
    h, c = normal(4, 2, 3, seed=1), normal(4, 2, 3, seed=2)
    check(layer, normal(5, 2, 4), (h, c) if kind == "LSTM" else h)
    h, c = h[:, 0], c[:, 0]
    check(layer, normal(5, 4))
    check(layer, normal(5, 4), (h, c) if kind == "LSTM" else h)
    with pytest.raises(RuntimeError, match="hidden size"):
        stackable(layer)(normal(5, 2, 4), (h[:, None], c[:, None]) if kind == "LSTM" else h[:, None])


def test_rnn_with_relu() -> None:
    check(nn.RNN(4, 3, nonlinearity="relu"), normal(5, 2, 4))


@pytest.mark.parametrize("options", RECURRENT.values(), ids=RECURRENT)
def test_lstm_with_projections(options: dict[str, Any]) -> None:
    check(nn.LSTM(4, 3, proj_size=2, **options), normal(5, 2, 4))


@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_cells(bias: bool) -> None:
    x, h, c = normal(2, 4), normal(2, 3, seed=1), normal(2, 3, seed=2)
    check(nn.LSTMCell(4, 3, bias=bias), x)
    check(nn.LSTMCell(4, 3, bias=bias), x, (h, c))
    for cell in (nn.GRUCell(4, 3, bias), nn.RNNCell(4, 3, bias), nn.RNNCell(4, 3, bias, "relu")):
        check(cell, x)
        check(cell, x, h)
        check(cell, x[0], h[0])


def test_packed_sequences_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="packed"):
        stackable(nn.LSTM(4, 3))(pack_padded_sequence(normal(5, 2, 4), [5, 3]))


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "3×3": (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 5)),
    "1×1": (nn.Conv2d(3, 4, 1), (2, 3, 6, 5)),
    "1×1 with stride": (nn.Conv2d(3, 4, 1, stride=2), (2, 3, 6, 5)),
    "no bias": (nn.Conv2d(3, 4, 3, bias=False), (2, 3, 6, 5)),
    "uneven": (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(0, 2), dilation=(1, 2)), (2, 3, 9, 5)),
    "same": (nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)), (2, 3, 6, 5)),
    "valid": (nn.Conv2d(3, 4, 3, padding="valid"), (2, 3, 6, 5)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1), (2, 4, 6, 5)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4, padding=1), (2, 4, 6, 5)),
    "reflect": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 6, 5)),
    "replicate": (nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="replicate"), (2, 3, 6, 5)),
    "circular": (nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular"), (2, 3, 6, 5)),
    "one image": (nn.Conv2d(3, 4, 3, padding=1), (3, 6, 5)),
    "1-D": (nn.Conv1d(3, 4, 5, stride=2, padding=2), (2, 3, 9)),
    "1-D, one sequence": (nn.Conv1d(4, 6, 3, groups=2, dilation=2), (4, 9)),
    "3-D": (nn.Conv3d(2, 3, (1, 2, 3), padding=1, stride=(1, 2, 1)), (2, 2, 3, 4, 5)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(layer: nn.Module, shape: tuple[int, ...]) -> None:
    check(layer, normal(*shape))
    assert stackable(copy.deepcopy(layer))(normal(*shape)).is_contiguous()


def test_convolutions_refuse_inputs_that_pytorch_refuses() -> None:
    for shape in ((2, 5, 6, 5), (2, 3, 2, 2), (6, 5), (1, 1, 3, 6, 5)):
        for layer in (nn.Conv2d(3, 4, 3), stackable(nn.Conv2d(3, 4, 3))):
            with pytest.raises(RuntimeError):
                layer.double()(normal(*shape))


CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str
)
def test_self_attention(batch_first: bool, options: dict[str, Any]) -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first, **options)

        def forward(self, x: Tensor, **named: Any) -> Any:
            return self.attention(x, x, x, **named)

    x = normal(2, 5, 6) if batch_first else normal(5, 2, 6)
    check(SelfAttention(), x)
    one_more = any(name.startswith("add") for name in options)  # a causal PyTorch lets no query see this key
    check(SelfAttention(), x, need_weights=False, attn_mask=CAUSAL, is_causal=not one_more)
    check(SelfAttention(), x, average_attn_weights=False, attn_mask=normal(4, 5, 5))
    check(SelfAttention(), x, attn_mask=CAUSAL.expand(4, 5, 5), key_padding_mask=PADDED)
    check(SelfAttention(), x, key_padding_mask=normal(2, 5))
    check(SelfAttention(), normal(5, 6), attn_mask=normal(5, 5), key_padding_mask=normal(5))


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 3, "vdim": 4, "add_bias_kv": True}], ids=str
)
def test_cross_attention(options: dict[str, Any]) -> None:
    layer = nn.MultiheadAttention(6, 3, batch_first=True, **options)
    keys, values = normal(2, 5, options.get("kdim", 6)), normal(2, 5, options.get("vdim", 6), seed=1)
    check(layer, normal(2, 4, 6), keys, values, key_padding_mask=PADDED)


def test_a_query_without_keys_reads_zeros() -> None:
    layer = nn.MultiheadAttention(6, 2, bias=False, batch_first=True)
    nobody = torch.ones(2, 5, dtype=torch.bool)
    check(
        layer, normal(2, 4, 6), normal(2, 5, 6), normal(2, 5, 6), key_padding_mask=nobody, need_weights=False
    )


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformers(norm_first: bool, batch_first: bool) -> None:
    options: dict[str, Any] = {"dropout": 0.0, "norm_first": norm_first, "batch_first": batch_first}
    x = normal(2, 5, 6) if batch_first else normal(5, 2, 6)
    encoder_layer = nn.TransformerEncoderLayer(6, 2, 7, activation="gelu", **options)
    decoder_layer = nn.TransformerDecoderLayer(6, 2, 7, **options)
    nested = batch_first and not norm_first
    encoder = nn.TransformerEncoder(encoder_layer, 2, nn.LayerNorm(6), enable_nested_tensor=nested)
    decoder = nn.TransformerDecoder(decoder_layer, 2)
    check(encoder_layer, x, src_mask=CAUSAL)
    check(encoder, x, src_key_padding_mask=PADDED)
    check(encoder, x, mask=CAUSAL)
    check(decoder_layer, x, normal(*x.shape, seed=1), tgt_mask=CAUSAL)
    check(decoder, x, normal(*x.shape, seed=1), tgt_mask=CAUSAL, memory_key_padding_mask=PADDED)


def test_no_transformer_takes_the_fused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(*_: Any) -> None:
        raise AssertionError("PyTorch's fused kernel was called")

    layer = nn.TransformerEncoderLayer(6, 2, 7, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2).double().eval()
    ours = stackable(copy.deepcopy(theirs))
    with torch.no_grad():
        expected = theirs(normal(2, 5, 6))
        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fused)
        monkeypatch.setattr(torch, "_native_multi_head_attention", fused)
        monkeypatch.setattr(torch, "_nested_tensor_from_mask", fused)
        with pytest.raises(AssertionError, match="fused"):
            theirs(normal(2, 5, 6))
        torch.testing.assert_close(ours(normal(2, 5, 6)), expected, **CLOSE)
        ours(normal(2, 5, 6), src_key_padding_mask=PADDED)


FORMS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "max": (nn.MaxPool2d(2), (2, 3, 6, 5)),
    "max of tiles": (nn.MaxPool2d((2, 3)), (2, 3, 6, 6)),
    "max of tiles, 1-D": (nn.MaxPool1d(2), (2, 3, 6)),
    "max, overlapping": (nn.MaxPool2d((3, 2), stride=(2, 1), padding=1, dilation=(1, 2)), (2, 3, 6, 5)),
    "max, rounded up": (nn.MaxPool2d(2, ceil_mode=True), (3, 6, 5)),
    "max, 1-D": (nn.MaxPool1d(3, 2, 1), (2, 3, 7)),
    "mean": (nn.AvgPool2d(2), (2, 3, 6, 5)),
    "mean, overlapping": (nn.AvgPool2d((3, 2), stride=(2, 1), padding=1, divisor_override=5), (3, 6, 5)),
    "mean without padding": (nn.AvgPool2d(2, padding=1, count_include_pad=False), (2, 3, 6, 5)),
    "mean, 1-D": (nn.AvgPool1d(3, 2, 1), (2, 3, 7)),
    "layer norm": (nn.LayerNorm((3, 4)), (2, 3, 4)),
    "layer norm, no bias": (nn.LayerNorm(4, bias=False), (2, 3, 4)),
    "layer norm, no weight": (nn.LayerNorm(4, eps=0.1, elementwise_affine=False), (4,)),
    "group norm": (nn.GroupNorm(2, 4), (2, 4, 3, 5)),
    "group norm, no weight": (nn.GroupNorm(2, 4, affine=False), (2, 4)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4, padding=1, stride=2), (2, 4, 6, 5)),
    "depthwise, 1-D": (nn.Conv1d(4, 4, 3, groups=4, bias=False), (2, 4, 6)),
}


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize(("layer", "shape"), FORMS.values(), ids=FORMS)
def test_layers_with_a_form_for_the_compiler(layer: nn.Module, shape: tuple[int, ...], traced: bool) -> None:
    x = normal(*shape)
    with tracing(contiguous=True) if traced else nullcontext():
        check(nn.Sequential(nn.Linear(shape[-1], shape[-1]), layer), x)
        if "Max" in type(layer).__name__:
            check(nn.Sequential(nn.PReLU(), layer), x.round())  # of equal ones, the first has the gradient
            assert stackable(copy.deepcopy(layer))(torch.full_like(x, torch.nan)).isnan().all()


@pytest.mark.parametrize("padding", [None, 0, -1])
def test_embeddings(padding: int | None) -> None:
    ids = torch.tensor([[[1, 2, 4], [3, 0, 0]], [[4, 4, 4], [0, 1, 2]], [[0, 0, 0], [4, 3, 2]]])
    theirs = nn.Embedding(5, 4, padding).double()
    ours = stackable(copy.deepcopy(theirs))
    check_one_model(theirs, ours, (ids[0],), {})
    check_state(theirs, ours)
    rows = normal(ROWS, 5, 4)

    def loss(weight: Tensor, ids: Tensor) -> Tensor:
        return summed(functional_call(ours, {"weight": weight}, (ids,)))

    expected = torch.stack([grad(loss)(rows[i], ids[i]) for i in range(ROWS)])
    torch.testing.assert_close(vmap(grad(loss))(rows, ids), expected, **CLOSE)
    torch.testing.assert_close(grad(lambda r: vmap(loss)(r, ids).sum())(rows), expected, **CLOSE)
    # One table for all, or the same ids.
    frozen = vmap(loss, in_dims=(None, 0))(rows[0], ids)
    torch.testing.assert_close(frozen, torch.stack([loss(rows[0], i) for i in ids]), **CLOSE)
    same = vmap(loss, in_dims=(0, None))(rows, ids[0])
    torch.testing.assert_close(same, torch.stack([loss(r, ids[0]) for r in rows]), **CLOSE)


def test_ties_hooks_and_subclasses_stay() -> None:
    class Own(nn.LSTM):
        pass

    model: Any = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 1), Own(3, 3))
    model[1].weight = model[0].weight
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    ours: Any = stackable(copy.deepcopy(model))
    assert ours[1].weight is ours[0].weight
    assert type(ours[2]) is Own
    ours[0](torch.zeros(1, 3, 2))
    assert seen == [1]


def with_key(module: nn.Module, key: int | Tensor, *inputs: Any) -> Any:
    keys = dict.fromkeys(key_names(module), torch.as_tensor(key))
    return functional_call(module, keys, inputs)


DROPOUTS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {  # layer, inputs, dimensions of the mask
    "Dropout": (nn.Dropout(0.3), (40, 50, 10), 3),
    "Dropout, in place": (nn.Dropout(0.3, inplace=True), (20000,), 1),
    "Dropout1d": (nn.Dropout1d(0.3), (100, 200, 2), 2),
    "Dropout1d, one sample": (nn.Dropout1d(0.3), (20000, 2), 1),
    "Dropout2d": (nn.Dropout2d(0.3), (100, 200, 2, 2), 2),
    "Dropout3d": (nn.Dropout3d(0.3), (100, 200, 2, 1, 2), 2),
    "Dropout3d, one sample": (nn.Dropout3d(0.3), (20000, 2, 1, 2), 1),
    "AlphaDropout": (nn.AlphaDropout(0.3), (40, 50, 10), 3),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.3), (100, 200, 2), 2),
}


@pytest.mark.parametrize(("layer", "shape", "dims"), DROPOUTS.values(), ids=DROPOUTS)
def test_dropout(layer: nn.Module, shape: tuple[int, ...], dims: int) -> None:
    x = normal(*shape)
    model = stackable(nn.Sequential(copy.deepcopy(layer), copy.deepcopy(layer)))
    first, second = model.children()
    assert key_names(model) == ["0.dropout_key", "1.dropout_key"]
    assert not model.state_dict()
    out = with_key(first, 5, x)
    zero = out.flatten().mode().values  # of which alpha dropout has another
    dropped = out == zero
    # One mask for all of a channel.
    whole = dropped.flatten(dims) if x.dim() > dims else dropped.unsqueeze(-1)
    assert (whole == whole[..., :1]).all()
    assert whole[..., 0].double().mean().item() == pytest.approx(0.3, abs=0.015)
    # What is kept and what is dropped have PyTorch's values.
    torch.manual_seed(0)
    theirs = layer(x.clone())
    torch.testing.assert_close(theirs.flatten().mode().values, zero, **CLOSE)
    both = ~dropped & ~theirs.isclose(zero, rtol=0, atol=1e-12)
    torch.testing.assert_close(out[both], theirs[both], **CLOSE)
    # Other keys and layers draw other masks; models stacked, the same.
    assert torch.equal(out, with_key(first, 5, x))
    assert not torch.equal(out, with_key(first, 6, x))
    assert not torch.equal(out, with_key(second, 5, x))
    stacked = vmap(lambda key: with_key(first, key, x))(torch.tensor([4, 5, 6]))
    assert torch.equal(stacked[1], out)
    assert torch.equal(with_key(first.eval(), 5, x), x)


def test_dropout_of_everything_and_of_nothing() -> None:
    x = normal(3, 4).requires_grad_()
    for layer in (nn.Dropout(1.0), nn.Dropout2d(1.0), nn.AlphaDropout(1.0)):
        out = stackable(layer)(x)
        assert not out.any()
        assert not torch.autograd.grad((out + 0 * x).sum(), x)[0].any()
    nothing: Any = stackable(nn.Sequential(nn.Dropout(0.0), nn.LSTM(4, 4), nn.MultiheadAttention(4, 2)))
    assert key_names(nothing) == []
    assert torch.equal(nothing[0](x), x)


class Last(nn.Module):
    """The first output of a recurrent or an attention layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        attention = isinstance(self.layer, nn.MultiheadAttention)
        out: Tensor = self.layer(x, x, x)[0] if attention else self.layer(x)[0]
        return out


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "MultiheadAttention"])
def test_dropout_inside_of_layers(kind: str, batch_first: bool) -> None:
    options: dict[str, Any] = {"dropout": 0.5, "batch_first": batch_first}
    if kind != "MultiheadAttention":
        options["num_layers"] = 3
    theirs = Last(getattr(nn, kind)(4, 4, **options)).double()
    ours = stackable(copy.deepcopy(theirs))
    x, samples = normal(6, 5, 4), 0 if batch_first else 1
    assert key_names(ours) == ["layer.dropout_key"]
    out = with_key(ours, 1, x)
    assert not torch.equal(out, with_key(ours, 2, x))
    assert torch.equal(out, with_key(ours, 1, x))
    stacked = vmap(lambda key: with_key(ours, key, x))(torch.tensor([0, 1]))
    torch.testing.assert_close(stacked[1], out, **CLOSE)
    # A sample's mask does not depend on how many come after it.
    torch.testing.assert_close(with_key(ours, 1, x.narrow(samples, 0, 2)), out.narrow(samples, 0, 2), **CLOSE)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), **CLOSE)
    # Over many keys, attention is what it is without dropout.
    if kind == "MultiheadAttention":
        mean = vmap(lambda key: with_key(ours.train(), key, x))(torch.arange(20000)).mean(0)
        torch.testing.assert_close(mean, theirs(x), rtol=0, atol=0.03)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], nn.Module]] = {
    "dropout": (F.dropout, nn.Dropout(0.3)),
    "dropout1d": (F.dropout1d, nn.Dropout1d(0.3)),
    "dropout2d": (F.dropout2d, nn.Dropout2d(0.3)),
    "dropout3d": (F.dropout3d, nn.Dropout3d(0.3)),
    "alpha_dropout": (F.alpha_dropout, nn.AlphaDropout(0.3)),
    "feature_alpha_dropout": (F.feature_alpha_dropout, nn.FeatureAlphaDropout(0.3)),
}


@pytest.mark.parametrize(("function", "layer"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_functional_dropout_is_counted(function: Callable[..., Tensor], layer: nn.Module) -> None:
    x = normal(
        *{"dropout1d": (6, 50, 2), "dropout3d": (6, 50, 1, 2, 2)}.get(function.__name__, (6, 50, 2, 2))
    )

    def twice(key: Tensor) -> tuple[Tensor, Tensor]:
        with CountedRandomness(key):
            return function(x, 0.3, training=True), function(x, 0.3, True)

    one, two = twice(torch.tensor(3))
    assert not torch.equal(one, two)
    torch.testing.assert_close(twice(torch.tensor(3)), (one, two), rtol=0, atol=0)
    assert not torch.equal(twice(torch.tensor(4))[0], one)
    assert torch.equal(vmap(twice)(torch.arange(5))[1][3], two)
    # The n-th call is what a layer with the number -n does.
    ours: Any = stackable(layer)
    ours.dropout_layer = -2
    assert torch.equal(with_key(ours, 3, x), two)
    with CountedRandomness(torch.tensor(3)):
        assert torch.equal(function(x, 0.3, False), x)
        assert torch.equal(function(x, 0.0, True), x)
        assert torch.equal(function(x, 0.3, True), one)  # only calls that drop are counted


def test_torch_dropout_is_counted() -> None:
    x = normal(50)
    with CountedRandomness(torch.tensor(3)):
        one = torch.dropout(x, 0.3, True)
        assert torch.equal(torch.dropout(x, p=0.3, train=False), x)
        two = torch.dropout(x, p=0.3, train=True)
    with CountedRandomness(torch.tensor(3)):
        assert torch.equal(F.dropout(x, 0.3), one)
        assert torch.equal(F.dropout(x, 0.3), two)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3, "attn_mask": torch.ones(4, 5, dtype=torch.bool).tril(1)},
        {"attn_mask": normal(2, 1, 4, 5)},
    ],
    ids=str,
)
def test_functional_attention(options: dict[str, Any]) -> None:
    q, k, v = normal(2, 6, 4, 3), normal(2, 6, 5, 3, seed=1), normal(2, 6, 5, 2, seed=2)

    def attention(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **options)

    expected = attention(q, k, v)
    grouped = F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], enable_gqa=True, **options)
    key = torch.tensor(3)
    with CountedRandomness(key):
        torch.testing.assert_close(attention(q, k, v), expected, **CLOSE)
        gqa = F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], enable_gqa=True, **options)
        torch.testing.assert_close(gqa, grouped, **CLOSE)
        dropped = attention(q, k, v, 0.5)

    def counted(key: Tensor) -> Tensor:
        with CountedRandomness(key):
            return attention(q, k, v, 0.5)

    assert not torch.equal(dropped, expected)
    torch.testing.assert_close(counted(key), dropped, **CLOSE)
    many = vmap(counted)(torch.arange(10000))
    torch.testing.assert_close(many[3], dropped, **CLOSE)
    torch.testing.assert_close(many.mean(0), expected, rtol=0, atol=0.1)


def test_a_compiled_lstm_has_the_backward_pass_written_here() -> None:
    """Its weight's gradient is one product, not one for each token."""
    layer, steps = stackable(nn.LSTM(4, 3, batch_first=True).double()), 7

    def gradients(rows: Parameters, x: Tensor) -> Parameters:
        out: dict[str, Tensor] = grad(
            lambda r: vmap(lambda r, x: functional_call(layer, r, (x,))[0].sum())(r, x).sum()
        )(rows)
        return out

    rows = {name: p.detach().expand(2, *p.shape).clone() for name, p in layer.named_parameters()}
    with tracing(contiguous=False):
        graph = make_fx(gradients)(rows, normal(2, 2, steps, 4)).graph
    products = [node for node in graph.nodes if node.target is torch.ops.aten.bmm.default]
    # The inputs' part and its weight's gradient, the recurrent weight's gradient, and two for each token.
    assert steps < len(products) <= 3 + 2 * steps
