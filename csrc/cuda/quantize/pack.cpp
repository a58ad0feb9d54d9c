// SPDX-License-Identifier: Apache-2.0
// Rows of the ops quantize and all_finite. Both wait for the results of their kernels.
#include "cuda/backend.hpp"
#include "cuda/sources.hpp"
#include "gpu/quantize/make_pack_call.hpp"
#include "gpu/refuses_format.hpp"

namespace lowbit::cuda {
namespace {

template <class T>
std::vector<T> read_back(const Place& place, std::string_view op, const void* from, int64_t count) {
  std::vector<T> to(static_cast<std::size_t>(count));
  ensure(driver().copy_to_host(to.data(), reinterpret_cast<uintptr_t>(from), to.size() * sizeof(T), place.stream),
         place.device, op);
  ensure(driver().synchronize(place.stream), place.device, op);
  return to;
}

void check_waits(const Place& place, std::string_view op) {
  check(!is_captured(place), ErrorKind::runtime, op,
        ": waits for the results of its kernels, and the stream is being captured in a CUDA graph; call it before");
}

void run_quantize(const QuantizeArgs& args) {
  check_waits(args.place, "quantize");
  const WeightSpec& spec = args.spec;
  const Workspace workspace("quantize", args.place, room_of(spec).all);
  const PackCall call = pack_call(args, workspace.at(0));
  const SourceKey key{static_cast<int64_t>(SourceKind::pack), static_cast<int64_t>(integers_as_int8(spec.format)),
                      args.searches()};
  const Program& pack = program(args.place, key, [&] { return pack_source(spec.format, args.searches()); });
  if (is_float(spec.format)) {
    pack.launch(args.place, "pack_floats", spec.panels(), kPackThreads, &call);
  } else {
    pack.launch(args.place, "pack_scales", spec.panels(), kPackThreads, &call);
    pack.launch(args.place, "pack_codes", spec.panels(), kPackThreads, &call);
  }
  *args.distortion = total(read_back<float>(args.place, "quantize", call.sums, spec.panels() * 3));
}

void run_all_finite(const AllFiniteArgs& args) {
  check_waits(args.place, "all_finite");
  const int64_t ctas = finite_ctas(args);
  const Workspace workspace("all_finite", args.place, ctas * 4);
  const FiniteCall call = finite_call(args, workspace.at(0));
  program(args.place, {static_cast<int64_t>(SourceKind::all_finite)}, all_finite_source)
      .launch(args.place, "find_not_finite", ctas, kPackThreads, &call);
  *args.result = is_finite(read_back<int32_t>(args.place, "all_finite", call.found, ctas));
}

std::string_view refuses(const QuantizeArgs& args) { return gpu::refuses_format(args.spec.format); }
std::string_view takes_each(const AllFiniteArgs&) { return ""; }

constexpr Kernel<QuantizeArgs> kQuantizeRows[] = {{"quantize_panels_cuda", refuses, run_quantize}};
constexpr Kernel<AllFiniteArgs> kFiniteRows[] = {{"all_finite_cuda", takes_each, run_all_finite}};

std::string kernel_of(std::string_view name, Format format, std::string_view more = "") {
  return kernel_text(name, "kPackThreads", "PackCall",
                     concat(name, "<lowbit::Format::", kFormatNames[static_cast<int>(format)], more, ">"));
}

}  // namespace

Source pack_source(Format format, bool searches) {
  const Format of = integers_as_int8(format);
  const std::string what(is_integer(of) ? "integers" : kFormatNames[static_cast<int>(of)]);
  return {concat("quantize to ", what, searches ? " by search" : ""),
          concat("#include \"gpu/quantize/pack.cuh\"\n",
                 is_float(of) ? kernel_of("pack_floats", of)
                              : kernel_of("pack_scales", of, searches ? ", true" : ", false") +
                                    kernel_of("pack_codes", of))};
}

Source all_finite_source() {
  return {"a search for inf and nan",
          concat("#include \"gpu/quantize/pack.cuh\"\n",
                 kernel_text("find_not_finite", "kPackThreads", "FiniteCall", "all_finite"))};
}

void add_pack_rows(Backend& backend) {
  add_rows(backend, kQuantizeRows, std::size(kQuantizeRows));
  add_rows(backend, kFiniteRows, std::size(kFiniteRows));
}

}  // namespace lowbit::cuda
