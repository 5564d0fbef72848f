"""The public names."""

import longspan.model


def test_all_is_sorted_complete_and_importable():
    names = longspan.model.__all__
    public = {name for name in vars(longspan.model) if not name.startswith("_")}
    modules = {"config", "decoder", "huggingface", "loss", "rope"}
    assert set(names) == public - modules
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
