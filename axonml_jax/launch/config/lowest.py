"""The lowest values that settings may have."""


def at_least(section: str, config: object, problems: list[str] | None = None, **lowest: float) -> None:
    """Refuse settings below their lowest values; null is no value.

    Args:
      section: of the configuration.
      config: the section's values.
      problems: what else is wrong with them.
      lowest: by name.

    Raises:
      ValueError: with everything that is wrong.
    """
    problems = list(problems or ())
    for name, low in lowest.items():
        if (value := getattr(config, name)) is not None and not value >= low:
            problems.append(f"{name}={value}: must be at least {low}")
    if problems:
        raise ValueError("; ".join(f"{section}.{problem}" for problem in problems))
