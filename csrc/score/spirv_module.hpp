// SPDX-License-Identifier: Apache-2.0
// Writes a module of SPIR-V 1.2: functions that only call those of other modules. A type is a letter: v void, i a
// 32-bit int, l a 64-bit int, f float, p a pointer to l in global memory. A signature is the type of the result, then
// those of the parameters.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lowbit::spirv {

using Id = uint32_t;
using Words = std::vector<uint32_t>;

enum class Opcode : uint16_t {  // numbers of the specification
  memory_model = 14, capability = 17, type_void = 19, type_int = 21, type_float = 22, type_pointer = 32,
  type_function = 33, constant = 43, function = 54, function_parameter = 55, function_end = 56, function_call = 57,
  decorate = 71, bitcast = 124, label = 248, return_value = 254,
};

inline void put(Words& to, Opcode op, const Words& operands = {}) {
  to.push_back(static_cast<uint32_t>(operands.size() + 1) << 16 | static_cast<uint32_t>(op));
  to.insert(to.end(), operands.begin(), operands.end());
}

class Module {
 public:
  Id constant(char letter, uint64_t bits) {
    Words operands{type(letter), static_cast<uint32_t>(bits)};
    if (letter == 'l') operands.push_back(static_cast<uint32_t>(bits >> 32));
    return once(Opcode::constant, operands, 1);
  }

  // Begins an exported function, and returns its parameters.
  Words begin_function(std::string_view name, std::string_view signature) {
    Words parameters;
    declare(functions_, name, kExport, signature, &parameters);
    put(functions_, Opcode::label, {bound_++});
    return parameters;
  }
  Id call(std::string_view name, std::string_view signature, const Words& arguments) {
    auto found = imports_.find(name);
    if (found == imports_.end()) {
      found = imports_.emplace(name, declare(declarations_, name, kImport, signature)).first;
      put(declarations_, Opcode::function_end);
    }
    Words operands{type(signature[0]), bound_, found->second};
    operands.insert(operands.end(), arguments.begin(), arguments.end());
    put(functions_, Opcode::function_call, operands);
    return bound_++;
  }
  Id with_bits_of(Id value, char letter) {  // as another 32-bit type
    put(functions_, Opcode::bitcast, {type(letter), bound_, value});
    return bound_++;
  }
  void end_function(Id result) {
    put(functions_, Opcode::return_value, {result});
    put(functions_, Opcode::function_end);
  }

  Words words() const {
    constexpr uint32_t kMagic = 0x07230203, kVersion = 0x00010200;  // 1.2: the version read by drivers of 2022
    constexpr uint32_t kAddresses = 4, kLinkage = 5, kKernel = 6, kInt64 = 11;
    constexpr uint32_t kPhysical64 = 2, kOpenCl = 2;
    Words made{kMagic, kVersion, 0, bound_, 0};
    for (const uint32_t capability : {kAddresses, kLinkage, kKernel, kInt64})
      put(made, Opcode::capability, {capability});
    put(made, Opcode::memory_model, {kPhysical64, kOpenCl});
    for (const Words* part : {&decorations_, &globals_, &declarations_, &functions_})
      made.insert(made.end(), part->begin(), part->end());
    return made;
  }

 private:
  static constexpr uint32_t kExport = 0, kImport = 1;

  // Emits a type or a constant once; its own id comes after `before` of its operands.
  Id once(Opcode op, const Words& operands, int before = 0) {
    Words key{static_cast<uint32_t>(op)};
    key.insert(key.end(), operands.begin(), operands.end());
    const auto [found, is_new] = known_.try_emplace(std::move(key), bound_);
    if (!is_new) return found->second;
    Words with_id = operands;
    with_id.insert(with_id.begin() + before, bound_);
    put(globals_, op, with_id);
    return bound_++;
  }

  Id type(char letter) {
    constexpr uint32_t kGlobalMemory = 5;
    switch (letter) {
      case 'v': return once(Opcode::type_void, {});
      case 'i': return once(Opcode::type_int, {32, 0});
      case 'l': return once(Opcode::type_int, {64, 0});
      case 'f': return once(Opcode::type_float, {32});
      default: return once(Opcode::type_pointer, {kGlobalMemory, type('l')});
    }
  }

  Id declare(Words& to, std::string_view name, uint32_t linkage, std::string_view signature,
             Words* parameters = nullptr) {
    constexpr uint32_t kLinkageAttributes = 41, kInline = 1;
    Words types;
    for (const char letter : signature) types.push_back(type(letter));
    const Id of = once(Opcode::type_function, types), function = bound_++;
    Words decoration{function, kLinkageAttributes};
    decoration.resize(2 + name.size() / 4 + 1);  // with a zero after the name
    std::memcpy(&decoration[2], name.data(), name.size());
    decoration.push_back(linkage);
    put(decorations_, Opcode::decorate, decoration);
    put(to, Opcode::function, {types[0], function, kInline, of});
    for (std::size_t i = 1; i < types.size(); i++) {
      put(to, Opcode::function_parameter, {types[i], bound_});
      if (parameters) parameters->push_back(bound_);
      bound_++;
    }
    return function;
  }

  Id bound_ = 1;
  std::map<Words, Id> known_;
  std::map<std::string, Id, std::less<>> imports_;
  Words decorations_, globals_, declarations_, functions_;
};

}  // namespace lowbit::spirv
