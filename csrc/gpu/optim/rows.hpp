// SPDX-License-Identifier: Apache-2.0
// Adds the rows of the ops optim_step, encode_state and decode_state: one per format. Kernels provide `step`, `convert`
// (with a kernel whose name begins with that of the op), and `refuses`: which calls they cannot serve.
#pragma once

#include <string>
#include <utility>

#include "gpu/optim/table.hpp"
#include "ops/optim.hpp"

namespace lowbit::gpu {

template <class Kernels, StateFormat kFormat, class Args>
void add_optim_row(Backend& backend, void (*run)(const Args&)) {
  const auto& name = *new std::string(  // never freed, like the backend
      concat(OpOf<Args>::name, "_", kStateFormatNames[static_cast<int>(kFormat)], "_", backend.name));
  const auto refuses = [](const Args& args) -> std::string_view {
    if (args.format != kFormat) return "another state format";
    if constexpr (requires { args.corrections; })
      if (!args.corrections.empty()) return "corrections of parameters (master=\"bf16+8\") are for the CPU";
    return Kernels::refuses(args);
  };
  const Kernel<Args> row{name, refuses, run};
  add_rows(backend, &row, 1);
}

template <class Kernels, class Args>
void run_conversion(const Args& args) {
  const ConvertArgs given{const_cast<float*>(args.values.template as<const float>()),
                          const_cast<uint8_t*>(args.codes.template as<const uint8_t>()),
                          const_cast<float*>(args.scale.template as<const float>()), args.values.numel()};
  if (given.numel > 0) Kernels::convert(args, std::string(OpOf<Args>::name), given);
}

template <class Kernels, StateFormat kFormat>
void add_optim_rows_of(Backend& backend) {
  add_optim_row<Kernels, kFormat>(backend, Kernels::step);
  if constexpr (has_codes(kFormat)) {
    add_optim_row<Kernels, kFormat>(backend, run_conversion<Kernels, EncodeStateArgs>);
    add_optim_row<Kernels, kFormat>(backend, run_conversion<Kernels, DecodeStateArgs>);
  }
}

template <class Kernels>
void add_optim_rows(Backend& backend) {
  [&]<int... format>(std::integer_sequence<int, format...>) {
    (add_optim_rows_of<Kernels, StateFormat{format}>(backend), ...);
  }(std::make_integer_sequence<int, std::size(kStateFormatNames)>());
}

}  // namespace lowbit::gpu
