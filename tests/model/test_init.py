"""The public names."""

import longspan.model


def test_all_is_sorted_complete_and_importable():
    names = longspan.model.__all__
    assert set(names) == set(longspan.model._HOME) == set(dir(longspan.model))
    assert all(getattr(longspan.model, name) is not None for name in names)
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
