"""Of every key of a family's config each other value gives what transformers makes of it, or is refused."""

import warnings

import pytest
from config_keys import FAMILIES, outcomes

# What transformers does not take, and what means the same as if it were left out: the logits have no part in it, or
# (head_dim of Qwen2) older versions took it so.
HARMLESS = {("pad_token_id", "True"), ("pad_token_id", "0.5"), ("return_dict", "False"), ("head_dim", "None")}


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_read_as_transformers_reads_it_or_refused(family, tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of values that are not meant
        found = outcomes(family, tmp_path)
    capfd.readouterr()  # notes of what transformers' modules decode
    read = [o for o in found if o.agrees]
    refused = [o for o in found if o.ours]
    assert len(read) > 80, "most changes are of keys that do not matter, or are read"
    assert len({o.key for o in found}) > 50
    wrong = [o for o in found if not o.agrees and not o.ours and (o.key, o.value) not in HARMLESS]
    assert wrong == []
    for outcome in refused:
        assert outcome.ours.startswith("ValueError: "), outcome
        assert "\n" not in outcome.ours, outcome
    decoded_there = {(o.key, o.value) for o in found if o.gap is not None}
    assert {("rope_theta", "50.0"), ("rms_norm_eps", "0.0")} <= decoded_there, "something was changed that matters"


def test_what_matters_is_seen_to_matter(tmp_path, monkeypatch, capfd):
    """The test above notices a key that is not read: here `layer_types` of a Mistral, which was so."""
    from specdec.model.archs import FAMILIES as native
    from specdec.model.archs import Architecture

    read = native["mistral"].read
    monkeypatch.setitem(native, "mistral", Architecture(lambda config: read(config | {"layer_types": None})))
    wrong = {o.value for o in outcomes("mistral", tmp_path) if o.key == "layer_types" and not o.agrees and not o.ours}
    assert repr(["full_attention"] * 3) in wrong
