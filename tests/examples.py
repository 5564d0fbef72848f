"""How many examples a property test draws."""

from hypothesis import settings


def examples(nightly: int) -> settings:
    """So many under `make nightly` (`--hypothesis-profile=nightly`), a third of them otherwise; the same ones each time."""
    whole = settings.get_current_profile_name() == "nightly"
    return settings(max_examples=nightly if whole else -(-nightly // 3), deadline=None, derandomize=True)
