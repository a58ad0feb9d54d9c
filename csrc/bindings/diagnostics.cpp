// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <optional>

#include "bindings/register.hpp"
#include "core/bandwidth.hpp"
#include "core/isa.hpp"
#include "core/library.hpp"
#include "core/parallel.hpp"
#include "core/thread_count.hpp"
#include "external/backends.hpp"
#include "onednn/backend.hpp"
#include "ops/kernel.hpp"
#include "torch/boxed.hpp"
#include "torch/c_shim.hpp"
#include "torch/registration.hpp"

namespace lowbit {
namespace {

namespace py = pybind11;

py::dict isa() {
  py::dict result;
  py::list compiled;
  const auto providers = onednn::backends();
  for (const Backend* backend : backends()) {
    const bool provided = std::find(providers.begin(), providers.end(), backend) != providers.end();
    if (backend->device == DeviceType::cpu && !provided && !external::is_external(*backend))
      compiled.append(backend->name);
  }
  result["compiled"] = compiled;
  result["detected"] = detected_isa();
  try {
    result["chosen"] = chosen_isa();
    result["reason"] = isa_reason();
  } catch (
      const Error& error) {  // LOWBIT_ISA is invalid: reported here as by each op, beside the other facts
    result["chosen"] = "";
    result["reason"] = error.what();
  }
  return result;
}

py::dict threads() {
  py::dict result;
  result["count"] = num_threads();
  result["source"] = threads_source();
  return result;
}

struct CrowdedGuard {
  std::optional<OnCallerIfCrowded> held;
  void enter() { held.emplace(); }
  void exit(const py::args&) { held.reset(); }
};

py::list kernels(std::string_view op) {
  py::list rows;
  for (const RowInfo& info : rows_of(op)) {
    py::dict row;
    row["name"] = info.name, row["backend"] = info.backend, row["device"] = info.device,
    row["available"] = info.available, row["reason"] = info.reason;
    rows.append(row);
  }
  return rows;
}

// Another copy of lowbit may have registered already. Does not import torch: without it there is nothing
// to register with.
std::vector<std::string> taken_names() {
  std::vector<std::string> taken;
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains("torch")) return taken;
  const py::object has_kernel = modules["torch"].attr("_C").attr("_dispatch_has_kernel");
  for (const std::string& name : torch::op_names())
    if (has_kernel(name).cast<bool>()) taken.push_back(name);
  return taken;
}

py::list register_torch() {
  py::list rows;
  for (const torch::Registration& registration : torch::register_ops(taken_names())) {
    py::dict row;
    row["op"] = registration.op, row["how"] = registration.how, row["reason"] = registration.reason;
    rows.append(row);
  }
  return rows;
}

std::map<std::string, std::string> c_declarations() {
  std::map<std::string, std::string> declarations;
  for (const torch::RegisteredOp* op : torch::all_ops())
    if (op->c_shim) declarations[std::string(op->name)] = torch::c_declaration(*op);
  return declarations;
}

std::optional<std::string> force(const std::optional<std::string>& name) {
  const std::string previous = force_kernel(name.value_or(""));
  return previous.empty() ? std::nullopt : std::optional(previous);
}

}  // namespace

void register_diagnostics(py::module_& m) {
  py::list ops;
#define LOWBIT_OP(op, Args) ops.append(#op);
  LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP
  m.attr("OPS") = py::tuple(ops);
  m.def(
      "isa", isa,
      "Return the instruction set levels compiled in, detected and chosen, and why the chosen one is lower, or empty.");
  m.def("threads", threads, "Return how many threads a kernel may use now, and whose they are.");
  m.def("opened_regions", opened_regions, "Return how many parallel regions this thread has opened so far.");
  py::class_<CrowdedGuard>(m, "OnCallerIfCrowded",
                           "A context in which torch's ops run on this thread alone while other processes occupy the "
                           "cores. OpenMP's regions would wait for threads that have none.")
      .def(py::init<>())
      .def("__enter__", &CrowdedGuard::enter)
      .def("__exit__", &CrowdedGuard::exit);
  m.def("look_in", look_in, py::arg("folders"),
        "Folders of Python packages beside which libraries are searched; before the first call that opens a library.");
  m.def("register_torch", register_torch,
        "Give lowbit::* to torch's dispatcher (idempotent); return per op how, or why not.");
  m.def(
      "register_torch_key", torch::register_key, py::arg("key"),
      "Give the ops that C++ registered to one more dispatch key of torch, with the same kernels; return their names.");
  m.def("c_declarations", c_declarations, "Return the text by which Inductor calls an op as a C function, per op.");
  m.def("look_at_devices", torch::look_at_devices,
        "From now on tensors are asked for their device, and torch for its current stream there.");
  m.def("kernels", kernels, py::arg("op"), "List the kernel rows of an op (OPS) on every device, best first.");
  m.def("force_kernel", force, py::arg("name"),
        "Make this thread use the named row only, None for the automatic choice; return what was forced before.");
  m.def("last_kernel", [](std::string_view op) { return std::string(last_kernel(op)); }, py::arg("op"),
        "Return the name of the row that ran last on this thread, or an empty string.");
  m.def("read_bandwidth", read_bandwidth, py::arg("bytes"), py::arg("streams"), py::arg("threads"),
        py::arg("repeats") = 1, py::call_guard<py::gil_scoped_release>(),
        "Return GB/s of reading memory: `threads` threads of `streams` prefetched streams each, best of `repeats`.");
}

}  // namespace lowbit
