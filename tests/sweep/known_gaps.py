"""What is not equal yet, and why. Strict: an entry that is right after all has to go.

The tests judge float64; the ledger marks these entries in every dtype.
"""

_NO_EXAMPLE = "of no examples: there is none to ask "
_ROWS = _NO_EXAMPLE + "how many entries are nonzero"
_DISTINCT = _NO_EXAMPLE + "how many values are distinct"
_PRODUCT = _NO_EXAMPLE + "whether a factor is zero, on which torch's backward depends"
_VARIANCE = _NO_EXAMPLE + "whether a variance is negative"
_CUTS = _NO_EXAMPLE + "where to cut"

_BOTH = ("vmap", "vmap∘vmap")
_TWICE = ("jvp∘vjp∘vmap", "vjp∘vjp∘vmap")
_MAPPED = (
    *_BOTH, "vmap∘vjp", "vmap∘jvp", "vjp∘vmap", "jvp∘vmap", "vmap∘linearize", *_TWICE
)  # fmt: skip
_PULLED = ("vmap∘jvp", "vjp∘vmap", "vmap∘linearize", *_TWICE)
_OPTIONS = "torch's gradients of it have no history, so a second derivative would lack its terms"

_ERRORS = [
    ("item", _BOTH, _NO_EXAMPLE + "for a Python number"),
    ("nonzero", _BOTH, _ROWS),
    ("nonzero out=", _BOTH, _ROWS),
    ("argwhere", _BOTH, _ROWS),
    ("unique", _BOTH, _DISTINCT),
    ("unique_consecutive", _BOTH, _DISTINCT),
    ("tensor_split", _MAPPED, _CUTS),
    ("nn.functional.gaussian_nll_loss", _MAPPED, _VARIANCE),
    ("index_reduce:prod", _PULLED, _PRODUCT),
    ("scatter_reduce:prod", _PULLED, _PRODUCT),
    ("addbmm in place", _BOTH, "torch gives the caller's tensor another shape in place"),
    (
        "to_sparse",
        ("vmap∘jvp", "jvp∘vmap", "jacfwd", "linearize", "vmap∘linearize"),
        "forward mode has no sparse tangents",
    ),
    ("to_sparse", ("vjp∘vjp∘vmap",), _NO_EXAMPLE + "that tells where entries are"),
    (
        "nn.functional.linear_cross_entropy:chunked",
        ("jvp∘vjp", "vjp∘vjp", *_TWICE),
        _OPTIONS,
    ),
    (
        "index_put",
        _TWICE,
        "the call has ended when a second backward pass asks how many places a mask has",
    ),
    ("sparse.sampled_addmm", ("jacfwd",), "a stack has no rows of its own to compress (CSR)"),
]

# (entry, word) -> why it is an error in some case.
GAPS = {(name, word): why for name, words, why in _ERRORS for word in words}

# (entry, word) -> why another value than torch's is none to mend.
EXCEPTIONS = {
    ("masked.prod", word): "next to a nan torch's backward divides by it, unless some factor is "
    "zero; of a tensor subclass, so of a stack or a dual, torch takes the form that never divides"
    for word in ("vmap∘vjp", "vjp∘vmap", "jvp∘vjp", *_TWICE)
} | {
    ("as_strided_scatter", word): "torch's backward takes a row of a tensor, which does not begin "
    "where the tensor does, for its first one"
    for word in _TWICE
}
SHOWN_IN = {("masked.prod", "jvp∘vjp"): "float32"}  # where not in float64
