import importlib.metadata
import sys
import types

import pytest

import specsampling
from specsampling import BackendError, BackendNotInstalledError, UnknownBackendError, available_backends, load_model
from specsampling import _registry as registry


@pytest.fixture
def register(monkeypatch):
    """Replace the registered entry points by pairs of name and value."""

    def replace(*pairs):
        entries = [importlib.metadata.EntryPoint(name, value, registry._GROUP) for name, value in pairs]
        monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in entries if e.group == group])

    return replace


@pytest.fixture
def adapter(monkeypatch):
    """Make the module ``an_adapter`` importable; its loader returns what it was called with."""
    module = types.ModuleType("an_adapter")
    module.load = lambda *args, **kwargs: (args, kwargs)
    monkeypatch.setitem(sys.modules, "an_adapter", module)
    return module


def test_the_numpy_backend_is_found_under_its_name(checkpoint):
    model = load_model("numpy", checkpoint)
    assert (type(model).__module__.partition(".")[0], model.vocab_size) == ("specsampling_numpy", 256)


def test_the_loader_gets_checkpoint_dtype_device_and_options_as_they_are(register, adapter, tmp_path):
    register(("mine", "an_adapter:load"))
    assert load_model("mine", tmp_path) == ((tmp_path,), {"dtype": "float32", "device": None})
    assert load_model("mine", "hub/id", dtype="float16", device="cuda:1", depth=3) == (
        ("hub/id",),
        {"dtype": "float16", "device": "cuda:1", "depth": 3},
    )


def test_an_unknown_name_is_answered_with_those_registered(register):
    register(("b", "x:load"), ("a", "x:load"))
    with pytest.raises(
        UnknownBackendError, match=r"`name` must be a registered backend \(`a`, `b`\), got 'c'"
    ) as caught:
        load_model("c", ".")
    assert isinstance(caught.value, LookupError)
    register()
    with pytest.raises(UnknownBackendError, match=r"\(none\)"):
        load_model("numpy", ".")


def test_a_first_party_backend_without_its_framework_names_the_extra(register, monkeypatch):
    monkeypatch.setitem(registry._FIRST_PARTY, "torch", ("sys", "a_missing_framework"))
    register(("torch", "an_adapter_that_is_not_imported:load"))
    with pytest.raises(
        BackendNotInstalledError, match=r"`a_missing_framework`: pip install 'specsampling\[torch\]'"
    ) as caught:
        load_model("torch", ".")
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "a_missing_framework"
    (status,) = available_backends()
    assert not status.installed
    assert status.reason == str(caught.value)


def test_listing_imports_no_first_party_backend(register, monkeypatch):
    monkeypatch.setitem(registry._FIRST_PARTY, "torch", ("sys",))
    register(("torch", "a_module_that_does_not_exist:load"))
    assert available_backends() == (("torch", True, "a_module_that_does_not_exist:load", ""),)


@pytest.mark.parametrize("value", ["a_module_that_does_not_exist:load", "an_adapter:no_such_name"])
def test_an_adapter_that_cannot_be_imported_says_why(register, adapter, value):
    register(("theirs", value))
    with pytest.raises(BackendNotInstalledError, match=f"`theirs` \\({value}\\) cannot be imported: .*no") as caught:
        load_model("theirs", ".")
    assert caught.value.__cause__ is not None
    (status,) = available_backends()
    assert (status.installed, status.reason) == (False, str(caught.value))


def test_a_name_registered_twice_is_refused_and_hides_no_other(register, adapter):
    register(("mine", "an_adapter:load"), ("theirs", "an_adapter:load"), ("theirs", "x:load"))
    with pytest.raises(BackendError, match=r"`theirs` is registered more than once \(an_adapter:load, x:load\)"):
        load_model("theirs", ".")
    assert [(status.name, status.installed) for status in available_backends()] == [("mine", True), ("theirs", False)]


def test_the_same_registration_found_twice_is_no_clash(register, adapter):
    register(("mine", "an_adapter:load"), ("mine", "an_adapter:load"))
    assert load_model("mine", ".")[0] == (".",)


def test_every_first_party_entry_point_has_its_line_in_the_table():
    registered = {
        entry.name
        for entry in importlib.metadata.distribution("specsampling").entry_points
        if entry.group == registry._GROUP
    }
    assert registered == set(registry._FIRST_PARTY)
    extras = set(importlib.metadata.metadata("specsampling").get_all("Provides-Extra"))
    assert {name for name, packages in registry._FIRST_PARTY.items() if packages} <= extras


def test_numpy_is_listed_as_installed():
    status = {backend.name: backend for backend in specsampling.available_backends()}["numpy"]
    assert status == ("numpy", True, "specsampling_numpy:load", "")
