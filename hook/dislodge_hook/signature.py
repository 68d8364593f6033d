"""Wrapping a function so that nobody can tell from outside: same signature, same defaults, same errors."""

import functools
import inspect

from . import process

_TEMPLATE = """
def {name}({parameters}):
    if _process.inert{unless}:
        return _original({arguments})
    try:
        _note = _before({picked})
    except Exception as _error:
        _note = None
        _process.fault({label!r}, _error)
    _result = _original({arguments})
    try:
        _after(_note, _result)
    except Exception as _error:
        _process.fault({label!r}, _error)
    return _result
"""


def wrap(original, before=None, after=None, picks=(), acts=None):
    """A function with the signature of `original` that calls `before(*picked)`, the original, `after(note, result)`.

    `picks` names the parameters that `before` gets, each as a tuple of names it has had in SGLang's releases, and maybe
    its position, for an original that hides its parameters in `*args`; one that the original does not have is passed as
    None. `note` is what `before` returned. `acts(first argument, wrapper)` says
    whether this call is observed at all. Errors of these are counted, those of the original pass unchanged.
    """
    signature = inspect.signature(original)
    names = list(signature.parameters)
    defaults = {}
    source = _TEMPLATE.format(
        name=original.__name__ if original.__name__.isidentifier() else "wrapper",
        label=original.__qualname__,
        parameters=_parameters(signature, defaults),
        arguments=_arguments(signature),
        unless=f" or not _acts({names[0]})" if acts else "",
        picked=", ".join(_picked(signature, pick) for pick in picks),
    )
    scope = {
        "_process": process,
        "_original": original,
        "_before": before or _nothing,
        "_after": after or _nothing,
        "_hidden": _hidden,
        "_acts": lambda first: acts(first, wrapper),
        **defaults,
    }
    exec(compile(source, "<dislodge_hook>", "exec"), scope)
    wrapper = functools.wraps(original)(scope[original.__name__ if original.__name__.isidentifier() else "wrapper"])
    return wrapper


def _nothing(*_):
    return None


def _picked(signature, pick):
    """Source that gives one picked parameter inside the wrapper."""
    names = list(signature.parameters)
    named = next((name for name in pick if name in names), None)
    position = next((entry for entry in pick if isinstance(entry, int)), None)
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    rest = kinds.get(inspect.Parameter.VAR_POSITIONAL)
    if named is not None or position is None or rest is None:
        return named or "None"
    keywords = kinds.get(inspect.Parameter.VAR_KEYWORD, "{}")
    return f"_hidden({rest}, {keywords}, {position - names.index(rest)}, {pick!r})"


def _hidden(positional, keywords, position, names):
    for name in names:
        if name in keywords:
            return keywords[name]
    return positional[position] if 0 <= position < len(positional) else None


def _parameters(signature, defaults):
    """The parameter list as source. Default values are passed by name, so that they stay the very same objects."""
    parts, kind_before = [], None
    for index, parameter in enumerate(signature.parameters.values()):
        if kind_before is parameter.POSITIONAL_ONLY and parameter.kind is not parameter.POSITIONAL_ONLY:
            parts.append("/")
        if parameter.kind is parameter.KEYWORD_ONLY and kind_before not in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY):
            parts.append("*")
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.default is not parameter.empty:
            defaults[f"_default{index}"] = parameter.default
            text += f"=_default{index}"
        parts.append(text)
        kind_before = parameter.kind
    if kind_before is inspect.Parameter.POSITIONAL_ONLY:
        parts.append("/")
    return ", ".join(parts)


def _arguments(signature):
    forms = {
        inspect.Parameter.VAR_POSITIONAL: "*{0}",
        inspect.Parameter.VAR_KEYWORD: "**{0}",
        inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    }
    return ", ".join(forms.get(p.kind, "{0}").format(p.name) for p in signature.parameters.values())
