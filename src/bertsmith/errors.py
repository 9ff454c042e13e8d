"""The one exception that means "the user can mend this": the command line prints its sentence and exits with code 2."""


class UserError(Exception):
    """The user's input, options or machine are at fault. `str(error)` is the whole message: what, where, what to do."""


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise UserError unless `value` is among `allowed`; the message names both."""
    if value not in allowed:
        raise UserError(f"{name}: {value!r} is not known; use one of {', '.join(allowed)}")
