"""The one exception that means "the user can mend this": the command line prints its sentence and exits with code 2."""

import numbers


class UserError(Exception):
    """The user's input, options or machine are at fault. `str(error)` is the whole message: what, where, what to do."""


class ToldElsewhere(UserError):
    """Another process of a run on several tells the user, or has told; this one ends without a word."""


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise UserError unless `value` is among `allowed`; the message names both."""
    if value not in allowed:
        raise UserError(f"{name}: {value!r} is not known; use one of {', '.join(allowed)}")


def whole_number(name: str, value: object, least: int | None = None) -> int:
    """`value` as an int, NumPy's numbers among them; True is none, though Python counts it so.

    Raises UserError for anything else and for what is below `least`.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and (least is None or int(value) >= least):
        return int(value)
    wanted = "a whole number" if least is None else f"a number from {least} up"
    raise UserError(f"{name}: {value!r} is not {wanted}")


def not_finite(what: str) -> UserError:
    """For a model whose numbers are NaN or infinite: `what` of it, and where."""
    return UserError(
        f"{what} are not finite numbers; its training diverged (lower --learning-rate) or its weights are damaged"
    )


def why_out_of_memory(error: BaseException) -> str | None:
    """A sentence for the user when `error` says that memory ran out, on the CPU or a GPU; None otherwise."""
    # torch raises a RuntimeError on the CPU, an OutOfMemoryError of its own on CUDA; Arrow a MemoryError of its own
    if not (
        isinstance(error, MemoryError)
        or type(error).__name__ in ("OutOfMemoryError", "ArrowMemoryError")
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    ):
        return None
    detail = str(error).partition("\n")[0].strip()
    return (
        f"not enough memory{f' ({detail})' if detail else ''}; use a smaller --micro-batch-size or --batch, shorter "
        "sequences, a smaller --model or fewer --workers"
    )
