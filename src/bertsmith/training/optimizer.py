"""From gradients to new weights: AdamW as in the reference, or Muon on the encoder's matrices with AdamW on the rest.

In go fp32 parameters with their gradients and the schedule's factor, out come the parameters, updated in place. State
is exchanged as a flat `name -> tensor` dictionary, so that a checkpoint is a safetensors file and never a pickle.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from bertsmith.errors import UserError
from bertsmith.training.settings import OptimizerSettings


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: matrices (embeddings among them), not biases and layer norms.

    The reference's rule (google-research/bert, optimization.py: `exclude_from_weight_decay`), with the dimension as a
    second witness.
    """
    lowered = name.lower()
    return parameter.ndim >= 2 and "norm" not in lowered and not lowered.endswith("bias")


def is_encoder_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes it: the 2-D weights inside the encoder's layers, not embeddings, pooler or heads."""
    return parameter.ndim == 2 and "encoder.layer" in name and is_decayed(name, parameter)


class BertOptimizer:
    """Updates every parameter of `named_parameters` that requires a gradient; see the module's docstring.

    The learning rates in `settings` are peaks; `step` is given the schedule's share of them. Weights must be fp32: in
    bf16 an update of 1e-4 on a weight of 1 rounds to nothing, so bf16 belongs to the arithmetic, not to the weights.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        settings: OptimizerSettings,
        rate_scale: Callable[[str], float] = lambda name: 1.0,
        arithmetic: torch.dtype = torch.float32,
    ) -> None:
        """`rate_scale`: the share of AdamW's learning rate that the parameter of a name takes.

        `arithmetic`: of the model's products, bfloat16 where that is the faster one; Muon's follow it.
        """
        parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        for name, parameter in parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{name} is {parameter.dtype}; the optimizer updates fp32 master weights only")
        self.settings = settings
        self.steps = 0
        """Updates applied so far."""
        self._parameters = parameters
        matrices = {n: p for n, p in parameters.items() if settings.name == "muon" and is_encoder_matrix(n, p)}
        if settings.name == "muon" and not matrices:
            raise ValueError("muon updates the 2-D weights under encoder.layer, and this model has none")
        groups: dict[tuple[bool, float], dict[str, Parameter]] = {}
        for name, parameter in parameters.items():
            if name not in matrices:
                kind = (not is_decayed(name, parameter), rate_scale(name))
                groups.setdefault(kind, {})[name] = parameter
        ordered = sorted(groups.items(), key=lambda group: group[0])
        covered = [id(p) for group in (matrices, *groups.values()) for p in group.values()]
        assert len(set(covered)) == len(covered) == len(parameters), "each parameter belongs to exactly one group"
        self._matrices = _Muon(matrices, settings, arithmetic) if matrices else None
        self._rest = {name: parameter for _, group in ordered for name, parameter in group.items()}
        self._groups = [
            _AdamW(list(group.values()), 0.0 if plain else settings.weight_decay, scale)
            for (plain, scale), group in ordered
        ]

    def step(self, learning_rate_factor: float) -> None:
        """Apply one update with `learning_rate_factor` (the schedule's, in [0, 1]) of the peak learning rates.

        Raises RuntimeError naming the parameters that got no gradient: a part of the model that does not take part in
        the loss should not be there, or not require a gradient.
        """
        missing = [name for name, parameter in self._parameters.items() if parameter.grad is None]
        if missing:
            raise RuntimeError(f"no gradient reached {', '.join(missing[:5])} ({len(missing)} parameters in all)")
        self.steps += 1
        settings = self.settings
        rate, epsilon, decay_scale = settings.learning_rate * learning_rate_factor, settings.epsilon, 1.0
        if not settings.bias_correction:
            # torch divides the moments by c = 1 - β^t. Its update is lr' / c1 · m / (√v / √c2 + ε'): with
            # lr' = lr · c1 / √c2 and ε' = ε / √c2 that is lr · m / (√v + ε), the reference's; and lr' · wd' = lr · wd.
            correction1 = 1 - settings.beta1**self.steps
            root2 = math.sqrt(1 - settings.beta2**self.steps)
            rate, epsilon, decay_scale = rate * correction1 / root2, epsilon / root2, root2 / correction1
        for group in self._groups:
            group.step(rate, settings.beta1, settings.beta2, epsilon, decay_scale)
        if self._matrices is not None:
            self._matrices.step(learning_rate_factor)

    def decay_factor(self, name: str, learning_rate_factor: float) -> float:
        """What a step multiplies those rows of AdamW's parameter `name` by that have never had a gradient."""
        group = next(group for group in self._groups if any(self._parameters[name] is p for p in group.parameters))
        return 1 - self.settings.learning_rate * learning_rate_factor * group.rate_scale * group.decay

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything beside the weights that the next step depends on, under flat names; not copied.

        `step` (int64, the updates applied), `exp_avg.<parameter>` and `exp_avg_sq.<parameter>` (AdamW's moments),
        `momentum_buffer.<parameter>` (Muon's), each of the parameter's shape.
        """
        tensors = {"step": torch.tensor(self.steps, dtype=torch.int64)}
        moments = (pair for group in self._groups for pair in zip(group.exp_avgs, group.exp_avg_sqs, strict=True))
        for name, (exp_avg, exp_avg_sq) in zip(self._rest, moments, strict=True):
            tensors |= {f"exp_avg.{name}": exp_avg, f"exp_avg_sq.{name}": exp_avg_sq}
        if self._matrices is not None:
            tensors |= {f"momentum_buffer.{name}": buffer for name, buffer in self._matrices.buffers().items()}
        return tensors

    def check_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Raise UserError if the names, types or shapes are not those of this model and optimizer."""
        own = self.state_tensors()
        problems = [f"{name} is missing" for name in own if name not in tensors]
        problems += [f"{name} is not known" for name in tensors if name not in own]
        problems += [
            f"{name} is {_describe(tensors[name])} instead of {_describe(tensor)}"
            for name, tensor in own.items()
            if name in tensors and _describe(tensors[name]) != _describe(tensor)
        ]
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise UserError(
                f"the saved optimizer state does not fit this model and optimizer: {'; '.join(problems[:3])}{more}; "
                "resume with the settings the run was started with"
            )

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what `state_tensors` gave; exact.

        Raises UserError, and changes nothing, if they do not fit (see `check_state_tensors`).
        """
        self.check_state_tensors(tensors)
        for name, tensor in self.state_tensors().items():
            if name != "step":
                tensor.copy_(tensors[name])
        self.steps = int(tensors["step"])
        for group in self._groups:
            for step in group.steps:
                step.fill_(self.steps)


class _AdamW:
    """The parameters of one weight decay and one share of the learning rate, with their moments.

    torch's function, not its class torch.optim.AdamW: to make one imports the compiler, 2 seconds of every start.
    """

    def __init__(self, parameters: list[Parameter], decay: float, rate_scale: float) -> None:
        self.parameters, self.decay, self.rate_scale = parameters, decay, rate_scale
        self.exp_avgs = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
        self.exp_avg_sqs = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
        self.steps = [torch.zeros((), dtype=torch.float32, device=parameter.device) for parameter in parameters]

    @torch.no_grad()
    def step(self, rate: float, beta1: float, beta2: float, epsilon: float, decay_scale: float) -> None:
        """One update; every parameter has a gradient."""
        adamw(
            list[Tensor](self.parameters),
            [parameter.grad for parameter in self.parameters if parameter.grad is not None],
            self.exp_avgs,
            self.exp_avg_sqs,
            [],
            self.steps,
            fused=True,  # one pass over parameter, gradient and both moments, on the CPU too
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate * self.rate_scale,
            weight_decay=self.decay * decay_scale,
            eps=epsilon,
            maximize=False,
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def clip_gradients(parameters: Iterable[Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients down so that their common norm is at most `max_norm` (None: only measure it).

    Returns the norm before clipping as a 0-D fp32 tensor on the parameters' device, unread: reading it is the caller's
    synchronization. It is NaN or inf when any gradient is; the gradients are then of no use. As
    `clip_by_global_norm(1.0)` in the reference.
    """
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None], error_if_nonfinite=False
    )
    if hasattr(norm, "full_tensor"):  # of gradients that are divided among ranks
        norm = norm.full_tensor()
    # on the CPU the norm is there to be read, and a pass over the gradients is saved where it would multiply them by 1
    if max_norm is not None and not (norm.device.type == "cpu" and norm + 1e-6 <= max_norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# Quintic Newton-Schulz coefficients of the Muon write-up (kellerjordan.github.io/posts/muon), as torch.optim.Muon.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalize(matrices: Tensor, arithmetic: torch.dtype = torch.float32) -> Tensor:
    """The nearly orthogonal matrix closest to each of `matrices` (N, rows, columns): U Vᵀ of its SVD, roughly.

    Singular values come out within about 0.7 … 1.2, which is what Muon asks for. On CUDA, and where `arithmetic` is
    bfloat16 because the chip is fast at it, the iteration runs in bf16 as in torch.optim.Muon (on a Xeon with AMX a
    third to a seventh of the time). Else it runs in fp32 and on the small Gram matrix X Xᵀ only (X itself is multiplied
    once, at the end): 1.6 times fewer operations over BERT's shapes.
    """
    in_bf16 = matrices.is_cuda or arithmetic == torch.bfloat16
    return _iterate_in_bf16(matrices) if in_bf16 else _iterate_on_gram(matrices)


def _iterate_in_bf16(matrices: Tensor) -> Tensor:
    tall = matrices.size(-2) > matrices.size(-1)
    x = (matrices.mT if tall else matrices).bfloat16()  # (N, short, long)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT  # (N, short, short)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def _iterate_on_gram(matrices: Tensor) -> Tensor:
    # Each iteration is X ← P X with P = aI + bG + cG², G = X Xᵀ. P and G commute (both are polynomials in the first G),
    # so G ← P G P follows without X, and the product of all P is applied to X once.
    tall = matrices.size(-2) > matrices.size(-1)
    results = torch.empty_like(matrices)
    for matrix, result in zip(matrices, results, strict=True):  # one at a time stays in the cache
        matrix = matrix / matrix.norm().clamp(min=1e-7)
        gram = matrix.mT @ matrix if tall else matrix @ matrix.mT  # (short, short)
        product: Tensor | None = None
        for iteration in range(_ITERATIONS):
            polynomial = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
            polynomial.diagonal().add_(_A)
            product = polynomial if product is None else polynomial @ product
            if iteration < _ITERATIONS - 1:
                gram = polynomial @ gram @ polynomial
        assert product is not None
        # `product` is symmetric up to rounding, so that a tall X is multiplied from the right without a transpose
        torch.mm(matrix, product, out=result) if tall else torch.mm(product, matrix, out=result)
    return results


def _pieces(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The matrices that lie in a parameter (or its gradient), as views: three in a joined query/key/value."""
    if not name.endswith("qkv.weight"):
        return [(name, tensor)]
    return list(zip((f"{name}.query", f"{name}.key", f"{name}.value"), tensor.chunk(3), strict=True))


class _Muon:
    """Muon over matrices, all of one shape in one batch: momentum, orthogonalization, decoupled decay, update.

    The update is scaled by 0.2 √max(rows, columns) (arXiv 2502.16982), so that its size matches AdamW's and learning
    rates and decay carry over. Equal to torch.optim.Muon(adjust_lr_fn="match_rms_adamw") up to the arithmetic of the
    orthogonalization. Query, key and value are three matrices that lie in one parameter and are orthogonalized apart.
    """

    def __init__(self, matrices: dict[str, Parameter], settings: OptimizerSettings, arithmetic: torch.dtype) -> None:
        self.arithmetic = arithmetic
        self.learning_rate = settings.learning_rate * settings.matrix_rate_factor
        self.weight_decay, self.momentum = settings.weight_decay, settings.momentum
        self.groups: list[tuple[list[str], list[Tensor], Tensor]] = []
        self._matrices = matrices
        pieces = {
            name: piece for whole, parameter in matrices.items() for name, piece in _pieces(whole, parameter.detach())
        }
        for shape in dict.fromkeys(piece.shape for piece in pieces.values()):
            names = [name for name, piece in pieces.items() if piece.shape == shape]
            members = [pieces[name] for name in names]
            self.groups.append((names, members, members[0].new_zeros((len(members), *shape))))

    @torch.no_grad()
    def step(self, learning_rate_factor: float) -> None:
        rate = self.learning_rate * learning_rate_factor
        # `step` of the optimizer has seen to it that all gradients are there
        all_gradients = {
            name: piece
            for whole, parameter in self._matrices.items()
            if parameter.grad is not None
            for name, piece in _pieces(whole, parameter.grad)
        }
        for names, members, buffer in self.groups:
            gradients = torch.stack([all_gradients[name] for name in names])  # (N, rows, columns)
            buffer.lerp_(gradients, 1 - self.momentum)
            updates = orthogonalize(gradients.lerp_(buffer, self.momentum), self.arithmetic).to(members[0].dtype)
            scale = 0.2 * math.sqrt(max(updates.shape[-2:]))
            torch._foreach_mul_(members, 1 - rate * self.weight_decay)
            torch._foreach_add_(members, list(updates.unbind()), alpha=-rate * scale)

    def buffers(self) -> dict[str, Tensor]:
        """The momentum of each matrix by its name, as views."""
        return {name: row for names, _, buffer in self.groups for name, row in zip(names, buffer.unbind(), strict=True)}
