// SPDX-License-Identifier: Apache-2.0
// Rows of the ops quantize and all_finite, by the kernels of csrc/gpu. Both wait for the results of their kernels.
#include "gpu/quantize/make_pack_call.hpp"
#include "gpu/refuses_format.hpp"
#include "level_zero/backend.hpp"
#include "level_zero/runtime/memory.hpp"
#include "level_zero/runtime/program.hpp"

namespace lowbit::level_zero {
namespace {

template <class T>
std::vector<T> read_back(const Place& place, const void* from, int64_t count) {
  std::vector<T> to(static_cast<std::size_t>(count));
  copy(place.device, to.data(), from, to.size() * sizeof(T));
  return to;
}

void run_quantize(const QuantizeArgs& args) {
  const WeightSpec& spec = args.spec;
  const Workspace workspace("quantize", args.place, gpu::room_of(spec).all);
  const gpu::PackCall call = gpu::pack_call(args, workspace.at(0));
  const std::string_view format = kFormatNames[static_cast<int>(integers_as_int8(spec.format))];
  const Program& pack = program(args.place, "pack");
  const auto launch = [&](std::string_view kernel) {
    pack.launch(args.place, concat(kernel, format).c_str(), spec.panels(), gpu::kPackThreads, &call, sizeof call);
  };
  if (is_float(spec.format)) launch("pack_floats_");
  else launch("pack_scales_"), launch("pack_codes_");
  *args.distortion = gpu::total(read_back<float>(args.place, call.sums, spec.panels() * 3));
}

void run_all_finite(const AllFiniteArgs& args) {
  const int64_t groups = gpu::finite_ctas(args);
  const Workspace workspace("all_finite", args.place, groups * 4);
  const gpu::FiniteCall call = gpu::finite_call(args, workspace.at(0));
  program(args.place, "pack")
      .launch(args.place, "find_not_finite", groups, gpu::kPackThreads, &call, sizeof call);
  *args.result = gpu::is_finite(read_back<int32_t>(args.place, call.found, groups));
}

std::string_view refuses(const QuantizeArgs& args) { return gpu::refuses_format(args.spec.format); }
std::string_view takes_each(const AllFiniteArgs&) { return ""; }

constexpr Kernel<QuantizeArgs> kQuantizeRows[] = {{"quantize_panels_level_zero", refuses, run_quantize}};
constexpr Kernel<AllFiniteArgs> kFiniteRows[] = {{"all_finite_level_zero", takes_each, run_all_finite}};

}  // namespace

void add_pack_rows(Backend& backend) {
  add_rows(backend, kQuantizeRows, std::size(kQuantizeRows));
  add_rows(backend, kFiniteRows, std::size(kFiniteRows));
}

}  // namespace lowbit::level_zero
