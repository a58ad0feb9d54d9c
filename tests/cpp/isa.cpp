// SPDX-License-Identifier: Apache-2.0
// Prints the instruction set that csrc/core/isa.cpp finds, the one that LOWBIT_ISA leaves, and why they differ. Started
// by tests/cpp/test_arm.py.
#include "core/isa.hpp"

#include <cstdio>
#include <exception>

int main() {
  try {
    std::printf("%s %s %s\n", lowbit::detected_isa().data(), lowbit::chosen_isa().data(), lowbit::isa_reason().c_str());
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
}
