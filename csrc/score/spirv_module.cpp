// SPDX-License-Identifier: Apache-2.0
#include "score/spirv_module.hpp"

#include <cstring>

namespace lowbit::spirv {
namespace {

constexpr uint32_t kMagic = 0x07230203, kVersion = 0x00010200;  // 1.2: what drivers of 2022 read
constexpr uint32_t kPhysical64 = 2, kOpenCl = 2;                // addressing and memory model
constexpr uint32_t kGlobalMemory = 5;                           // storage class CrossWorkgroup
constexpr uint32_t kLinkage = 41, kExport = 0, kImport = 1;     // decoration LinkageAttributes

Words words_of(std::string_view text) {  // with a zero behind, filled up to four bytes
  Words words(text.size() / 4 + 1);
  std::memcpy(words.data(), text.data(), text.size());
  return words;
}

}  // namespace

int bytes_of(Type type) {
  if (type.pointer) return 8;
  switch (type.scalar) {
    case Scalar::nothing: case Scalar::boolean: return 0;  // not in memory
    case Scalar::u8: return 1;
    case Scalar::u16: return 2;
    case Scalar::i32: case Scalar::u32: case Scalar::f32: return 4;
    case Scalar::i64: case Scalar::u64: case Scalar::f64: break;
  }
  return 8;
}
bool is_float(Type type) { return !type.pointer && (type.scalar == Scalar::f32 || type.scalar == Scalar::f64); }
bool is_signed(Type type) { return !type.pointer && (type.scalar == Scalar::i32 || type.scalar == Scalar::i64); }

void put(Words& to, Op op, std::initializer_list<std::span<const uint32_t>> operands) {
  const std::size_t at = to.size();
  to.push_back(0);
  for (const auto& part : operands) to.insert(to.end(), part.begin(), part.end());
  to[at] = static_cast<uint32_t>(to.size() - at) << 16 | static_cast<uint32_t>(op);
}

Module::Module() = default;

Id Module::declared(Op op, Id result_type, std::span<const uint32_t> operands) {
  Words key{static_cast<uint32_t>(op), result_type};
  key.insert(key.end(), operands.begin(), operands.end());
  const auto [found, is_new] = known_.try_emplace(key, bound_);
  if (!is_new) return found->second;
  const Id id = fresh();
  const uint32_t ids[] = {result_type, id};
  put(globals_, op, {std::span(ids).subspan(result_type ? 0 : 1), operands});
  return id;
}

Id Module::type(Type type) {
  if (type.pointer) {
    const uint32_t to[] = {kGlobalMemory, this->type({type.scalar})};
    return declared(Op::type_pointer, 0, to);
  }
  const auto bits = static_cast<uint32_t>(8 * bytes_of(type));
  const uint32_t of_int[] = {bits, 0};  // kernels have no signs: instructions do
  switch (type.scalar) {
    case Scalar::nothing: return declared(Op::type_void, 0, {});
    case Scalar::boolean: return declared(Op::type_bool, 0, {});
    case Scalar::f64: capabilities_.insert(Capability::float64); [[fallthrough]];
    case Scalar::f32: return declared(Op::type_float, 0, std::span(&bits, 1));
    case Scalar::u8: capabilities_.insert(Capability::int8); break;
    case Scalar::u16: capabilities_.insert(Capability::int16); break;
    case Scalar::i32: case Scalar::u32: break;
    case Scalar::i64: case Scalar::u64: capabilities_.insert(Capability::int64); break;
  }
  return declared(Op::type_int, 0, of_int);
}

Id Module::function_type(Type result, std::span<const Type> parameters) {
  Words operands{type(result)};
  for (const Type parameter : parameters) operands.push_back(type(parameter));
  return declared(Op::type_function, 0, operands);
}

Id Module::constant(Type type, uint64_t bits) {
  const Id of = this->type(type);
  if (type.scalar == Scalar::boolean) return declared(bits ? Op::constant_true : Op::constant_false, of, {});
  const uint32_t words[] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
  return declared(Op::constant, of, std::span(words, bytes_of(type) == 8 ? 2 : 1));
}

void Module::export_function(Id function, std::string_view name) {
  const uint32_t before[] = {function, kLinkage}, after[] = {kExport};
  put(decorations_, Op::decorate, {before, words_of(name), after});
}

Id Module::import_function(std::string_view name, Type result, std::span<const Type> parameters) {
  const Id of = function_type(result, parameters), function = fresh();
  const uint32_t before[] = {function, kLinkage}, after[] = {kImport};
  put(decorations_, Op::decorate, {before, words_of(name), after});
  put(declarations_, Op::function, {type(result), function, 0, of});
  for (const Type parameter : parameters) put(declarations_, Op::function_parameter, {type(parameter), fresh()});
  put(declarations_, Op::function_end, {std::initializer_list<uint32_t>{}});
  return function;
}

Words Module::words() const {
  Words made{kMagic, kVersion, 0, bound_, 0};
  for (const Capability capability : capabilities_) put(made, Op::capability, {static_cast<uint32_t>(capability)});
  put(made, Op::ext_inst_import, {std::span(&kLibrary, 1), words_of("OpenCL.std")});
  put(made, Op::memory_model, {kPhysical64, kOpenCl});
  for (const Words* part : {&decorations_, &globals_, &declarations_, &functions_})
    made.insert(made.end(), part->begin(), part->end());
  return made;
}

}  // namespace lowbit::spirv
