// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include "bindings/register.hpp"
#include "core/os.hpp"
#include "core/parallel.hpp"
#include "ops/kernel.hpp"
#include "recorder/profile.hpp"
#include "recorder/ring.hpp"
#include "recorder/watcher.hpp"

namespace lowbit {
namespace {

namespace py = pybind11;
using namespace recorder;

py::dict state() {
  const Ring* const ring = recorder::ring_if_made();
  const bool on = (wants.load() & kRing) != 0;
  py::dict result;
  result["on"] = on, result["folder"] = folder(), result["path"] = ring ? ring->path : "";
  result["reason"] = ring ? ring->reason : "", result["watched"] = is_watched();
  return result;
}

Ring& ring_for(std::string_view what) {
  Ring* const ring = recorder::ring();
  check(ring != nullptr, ErrorKind::runtime, what,
        ": the recorder is off; LOWBIT_RECORD=1 in the environment or lowbit.recorder.start() turns it on");
  return *ring;
}

// A copy of the file, or of its content if there is none.
py::bytes snapshot() {
  const Ring& ring = ring_for("records");
  return py::bytes(reinterpret_cast<const char*>(ring.header), ring.bytes());
}

std::string dump(const std::string& path, std::string_view reason) {
  const Ring& ring = ring_for("dump");
  const std::string into = path.empty() ? next_dump_path(ring) : path;
  check(!into.empty(), ErrorKind::runtime, "dump: path must be given, there is no folder: ", ring.reason);
  const py::gil_scoped_release nogil;
  const std::string failed = write_dump(ring, into, reason);
  check(failed.empty(), ErrorKind::runtime, "dump: ", failed);
  return into;
}

DType dtype_of(std::string_view name) {
  for (int i = 0; i < static_cast<int>(DType::other); i++)
    if (name_of(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  return DType::other;
}

// A call of an op that is not lowbit's. The handle closes it; 0: none.
using Handle = std::pair<uint64_t, uint64_t>;
Handle open_call(std::string_view op, std::string_view row,
                 const std::vector<std::pair<std::string, std::vector<int64_t>>>& tensors, int64_t read,
                 int32_t group_sequence) {
  Ring* const ring = recorder::ring();
  if (!ring) return {0, 0};
  Call call{.read = read};
  for (const auto& [dtype, sizes] : tensors)
    call.add(dtype_of(dtype), sizes.data(), static_cast<int>(sizes.size()));
  const Place place{};
  const Claim claim =
      open_record(*ring, {.op = op, .row = row, .place = place, .call = call, .thread = this_thread(),
                          .group_sequence = group_sequence});
  return {reinterpret_cast<uint64_t>(claim.record), claim.sequence};
}

void close_call(const Handle& handle, bool finished) {
  Ring* const ring = recorder::ring_if_made();
  if (!ring || handle.first == 0) return;
  close_record(*ring, {reinterpret_cast<Record*>(handle.first), handle.second},
               finished ? State::finished : State::failed,
               this_thread());
}

void set_rank(int rank, int world) {
  if (Ring* const ring = recorder::ring()) ring->header->rank = rank, ring->header->world = world;
}

py::dict peak(std::string_view arithmetic, int threads, int repeats) {
  const bool integer = arithmetic == kArithmeticNames[static_cast<int>(Arithmetic::integer)];
  PeakRate rate;
  {
    const py::gil_scoped_release nogil;
    rate = peak_rate(integer ? Arithmetic::integer : Arithmetic::floating, threads, repeats);
  }
  py::dict result;
  result["what"] = rate.what, result["operations_per_s"] = rate.operations_per_s;
  return result;
}

}  // namespace

void register_recorder(py::module_& m) {
  py::module_ r = m.def_submodule("recorder", "The ring of calls of this process, and profiles.");
  r.attr("NAMES") = names_of_numbers();
  r.def("state", state, "Return whether the recorder is on, its folder, its file (empty: none, reason says why).");
  r.def("start", start, py::arg("records"), py::arg("folder"),
        "Record from now on; records None, folder empty: as the environment says.");
  r.def("snapshot", snapshot, "Return a copy of the ring as its file has it; makes the ring if there is none yet.");
  r.def("dump", dump, py::arg("path"), py::arg("reason"), "Write a copy of the ring; return the path.");
  r.def("watch", watch, py::arg("seconds"),
        "Dump when a call runs for longer than that (0: never), and on SIGUSR1, from a thread that needs no lock; "
        "record if that was off.");
  r.def("open_call", open_call, py::arg("op"), py::arg("row"), py::arg("tensors"), py::arg("read"),
        py::arg("group_sequence"), "Record a call that is no op of lowbit; return the handle for close_call.");
  r.def("close_call", close_call, py::arg("handle"), py::arg("finished"), "End such a call.");
  r.def("set_rank", set_rank, py::arg("rank"), py::arg("world"), "Say which rank of how many this process is.");
  r.def("is_held", os::is_held, py::arg("path"), "Return whether a live process records into this file.");
  r.def("begin_profile", begin_profile, "Keep every call from now on; return where this profile begins.");
  r.def(
      "end_profile", [](int64_t from) { return py::bytes(end_profile(from)); }, py::arg("begin"),
      "Return the records since begin_profile.");
  r.def("peak_rate", peak, py::arg("arithmetic"), py::arg("threads"), py::arg("repeats") = 5,
        "Return the most operations in a second that this CPU does in registers: float (float32 FMA) or int8.");
}

}  // namespace lowbit
