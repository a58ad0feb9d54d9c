# SPDX-License-Identifier: Apache-2.0
# Ways to hold a value that a mod reads, of which the first call's value was kept.
from tests.fuzz import check
from tests.fuzz.choices import Choices
from tests.fuzz.ops import flex_state

KEPT = (
    "ParameterList element", "ParameterList by an index", "ModuleList element", "self.biases[self.layer]", "deepcopy", "UserDict", "UserList",
    "ChainMap", "__getitem__", "__getattr__", "__len__", "__bool__", "__int__", "__index__", "__iter__", "__contains__", "__eq__", "__lt__",
    "__add__", "__neg__", "__float__", "getattr of joined names", "cached_property", "lru_cache", "os.environ", "os.getenv", "metaclass",
    "torch default dtype", "math's attribute", "a tensor's attribute", "int with an attribute",
)  # fmt: skip
wrong = []
for name in KEPT:
    try:
        with check.ambient("default dtype float32"):
            exec(flex_state.text_of(Choices(again=[]), name), {"__name__": "fuzz_case"})
    except AssertionError as error:
        wrong.append(str(error))
if wrong:
    raise check.Wrong(f"{len(wrong)} of {len(KEPT)} are stale:\n" + "\n".join(wrong))
