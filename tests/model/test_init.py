"""The public names."""

import longspan.model


def test_every_name_of_the_stub_is_importable():
    assert longspan.model.__all__ == dir(longspan.model)
    assert "Decoder" in longspan.model.__all__
    assert all(getattr(longspan.model, name) is not None for name in longspan.model.__all__)
