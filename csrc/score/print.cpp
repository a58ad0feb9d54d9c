// SPDX-License-Identifier: Apache-2.0
#include "score/print.hpp"

#include <array>
#include <bit>
#include <charconv>
#include <map>
#include <utility>

namespace lowbit {
namespace {

using namespace score;

// A name in the texts of score/ops.hpp and score/math.hpp, and its equivalent in each language. CUDA's functions with
// _rn are never contracted into a multiply-add, and their divisions never replaced, whatever the compiler options.
struct Word {
  std::string_view name, cuda, opencl;
};
constexpr Word kWords[] = {
    {"DEVICE", "__device__ __forceinline__", "static inline"},
    {"GLOBAL", "", "__global"},
    {"LAYOUT", "const long long*", "__global const long*"},
    {"FAULT", "int*", "volatile __global int*"},
    {"GRADIENT", "float*", "__global float*"},
    {"Float", "float", "float"},
    {"Int", "int", "int"},
    {"Long", "long long", "long"},
    {"element(p, at)", "__ldg((p) + (at))", "(p)[at]"},
    {"exchanged(p, value)", "atomicExch(p, value)", "atomic_xchg(p, value)"},
    {"bits_of_float(a)", "__float_as_uint(a)", "as_uint(a)"},
    {"float_from_bits(a)", "__uint_as_float(a)", "as_float(a)"},
    {"bits_of(a)", "((unsigned int)(a))", "((unsigned int)(a))"},
    {"wrapped(a)", "((int)(a))", "((int)(a))"},
    {"float_of(a)", "((float)(a))", "((float)(a))"},
    {"add_of(a, b)", "__fadd_rn(a, b)", "((float)(a) + (float)(b))"},
    {"sub_of(a, b)", "__fsub_rn(a, b)", "((float)(a) - (float)(b))"},
    {"mul_of(a, b)", "__fmul_rn(a, b)", "((float)(a) * (float)(b))"},
    {"div_of(a, b)", "__fdiv_rn(a, b)", "((float)(a) / (float)(b))"},
    {"fma_of(a, b, c)", "__fmaf_rn(a, b, c)", "fma((float)(a), (float)(b), (float)(c))"},
    {"sqrt_of(a)", "__fsqrt_rn(a)", "sqrt((float)(a))"},
    {"floor_of(a)", "floorf(a)", "floor((float)(a))"},
    {"round_of(a)", "rintf(a)", "rint((float)(a))"},
    {"copysign_of(a, b)", "copysignf(a, b)", "copysign((float)(a), (float)(b))"},
#define LOWBIT_WORD1(name) {#name "_of(a)", #name "f(a)", #name "((float)(a))"},
#define LOWBIT_WORD2(name) {#name "_of(a, b)", #name "f(a, b)", #name "((float)(a), (float)(b))"},
    LOWBIT_WORD1(exp) LOWBIT_WORD1(exp2) LOWBIT_WORD1(tanh)
    LOWBIT_LIBRARY1(LOWBIT_WORD1) LOWBIT_LIBRARY2(LOWBIT_WORD2)
#undef LOWBIT_WORD1
#undef LOWBIT_WORD2
};

// Texts of math.hpp, each after those that it uses.
constexpr std::string_view kShared[] = {remainder_of_text,     floor_divide_of_text, int_of_text,
                                        floor_divide_int_text, trunc_divide_int_text, remainder_int_text,
                                        shifted_left_text,     shifted_right_text};

constexpr std::string_view kNoteFault = R"(
DEVICE void note_fault(FAULT fault, int tensor, int dim, int index) {
  if (exchanged(fault, 1) == 0) fault[1] = tensor, fault[2] = dim, fault[3] = index;
}
)";
// Rounding to 16 bits and back like core/dtype.hpp, on bits; captured 16-bit tensors; addresses.
constexpr std::string_view kPrelude = R"(
DEVICE float rounded_to_bfloat16(float a) {
  const unsigned int bits = bits_of_float(a);
  return a != a ? a : float_from_bits((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}
DEVICE float rounded_to_float16(float a) {
  const unsigned int bits = bits_of_float(a), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  if (magnitude >= 0x477ff000u) return a != a ? a : float_from_bits(sign | 0x7f800000u);
  if (magnitude < 0x38800000u)
    return float_from_bits(sign | bits_of_float(sub_of(add_of(float_from_bits(magnitude), 0.5f), 0.5f)));
  return float_from_bits(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u)) & 0xffffe000u));
}
DEVICE float float_from_bfloat16(unsigned short a) { return float_from_bits((unsigned int)a << 16); }
DEVICE float float_from_float16(unsigned short a) {
  const unsigned int sign = (a & 0x8000u) << 16, magnitude = a & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return float_from_bits(sign | ((magnitude << 13) + 0x38000000u));
  return float_from_bits(sign | bits_of_float(mul_of((float)magnitude, 5.9604644775390625e-8f)));
}
DEVICE Long checked_index(int index, Long size, int tensor, int dim, FAULT fault) {
  const Long i = index < 0 ? index + size : index;
  if (i >= 0 && i < size) return i;
  note_fault(fault, tensor, dim, index);
  return -1;
}
)";
constexpr std::string_view kAddCuda = R"(DEVICE void add_to(float* p, float value) { atomicAdd(p, value); }
)";
constexpr std::string_view kAddOpencl = R"(DEVICE void add_to(__global float* p, float value) {
  volatile __global unsigned int* bits = (volatile __global unsigned int*)p;
  unsigned int before = *bits, wanted;
  do {
    wanted = before;
    before = atomic_cmpxchg(bits, wanted, as_uint(as_float(wanted) + value));
  } while (before != wanted);
}
)";

template <class Op>
constexpr std::string_view text_of() {
  if constexpr (requires { Op::text; }) return Op::text;
  else return {};
}
template <class... Ops>
constexpr auto texts(OpList<Ops...>) { return std::array{text_of<Ops>()...}; }
constexpr auto kTexts = texts(ScoreOps{});

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// The text with a, b, c replaced by the operands.
std::string with_operands(std::string_view text, const std::string* operands) {
  std::string made;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at;
    while (end < text.size() && is_letter(text[end])) end++;
    const std::string_view word = text.substr(at, end - at);
    if (word.size() == 1 && word[0] >= 'a' && word[0] <= 'c') made += operands[word[0] - 'a'];
    else made += word;
    if (end < text.size()) made += text[end++];
    at = end;
  }
  return made;
}

std::string_view type_name(char type) { return type == 'f' ? "float" : type == 'i' ? "int" : "bool"; }

std::string literal(char type, int64_t bits) {
  if (type != 'f') return bits >= 0 ? std::to_string(bits) : concat("(", bits + 1, " - 1)");  // -2^31 has no literal
  const float value = static_cast<float>(std::bit_cast<double>(bits));
  const bool finite = value - value == 0;
  if (!finite) return concat("float_from_bits(", std::bit_cast<uint32_t>(value), "u)");
  char text[32];  // the shortest text of this float
  std::string made(text, std::to_chars(text, text + sizeof text, value).ptr);
  if (made.find_first_of(".e") == std::string::npos) made += ".0";
  return value < 0 || std::signbit(value) ? concat("(", made, "f)") : made + "f";
}

// An element of a captured tensor in memory, and the code around it that converts it to a value.
struct Element {
  std::string_view type, before, after;
};
Element element_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return {"float", "", ""};
    case DType::bfloat16: return {"unsigned short", "float_from_bfloat16(", ")"};
    case DType::float16: return {"unsigned short", "float_from_float16(", ")"};
    case DType::float64: return {"double", "(float)", ""};
    case DType::int32: return {"int", "", ""};
    case DType::int64: return {"Long", "(int)", ""};
    default: return {"unsigned char", "", " != 0"};
  }
}

class Printer {
 public:
  Printer(const ScoreCall& call, bool gradient)
      : call_(call), program_(call.program()), gradient_(gradient),
        plan_(gradient ? program_.backward : program_.forward) {
    current_[{Rate::tile, kScoreMemory}] = "score", current_[{Rate::tile, kGradientMemory}] = "gradient";
  }

  std::string print_function() {
    text_ = concat("DEVICE float ", name(), "(", scores(true), "int b, int h, int q, int k, ", memory(", "),
                   "LAYOUT layout, FAULT fault) {\n");
    steps(Stage::head, Stage::head_after);
    return text_ + result() + "}\n";
  }

  std::string print_struct() {
    struct Part {
      Stage stage;
      std::string_view type, function, object;
    };
    constexpr Part kParts[] = {{Stage::row, "Row", "of_row(int q)", "row"},
                               {Stage::column, "Column", "of_column(int k)", "column"},
                               {Stage::diagonal, "Diagonal", "of_diagonal(int q, int k)", "diagonal"}};
    std::string of_head, functions, types;
    members_ = &of_head;
    steps(Stage::head, Stage::head);
    functions = concat("  DEVICE void of_head() {\n", std::exchange(text_, ""), "  }\n");
    for (const Part& part : kParts) {
      std::string members;
      members_ = &members, object_ = concat(part.object, ".");
      steps(part.stage, part.stage);
      types += concat("  struct ", part.type, " {\n", members, "  };\n");
      functions += concat("  DEVICE ", part.type, " ", part.function, " const {\n  ", part.type, " ", part.object,
                          ";\n", std::exchange(text_, ""), "  return ", part.object, ";\n  }\n");
    }
    members_ = nullptr, object_ = "";
    steps(Stage::tile, Stage::head_after);
    functions += concat("  DEVICE float of_score(", scores(true), "int q, int k, const Row& row, const Column& column, "
                        "const Diagonal& diagonal) const {\n", text_, result(), "  }\n",
                        "  DEVICE float operator()(", scores(true), "int q, int k) const {\n  return of_score(",
                        scores(false), "q, k, of_row(q), of_column(k), of_diagonal(q, k));\n  }\n");
    return concat("struct ", name(), " {\n  ", memory("; "), "LAYOUT layout; FAULT fault; int b, h;\n", of_head, types,
                  functions, "};\n");
  }

 private:
  const std::vector<CapturedType>& captured() const { return program_.graph.captured; }

  std::string name() const { return concat(program_.is_mask ? "mask_mod" : "score_mod", gradient_ ? "_gradient" : ""); }
  std::string scores(bool typed) const {
    const std::string_view type = typed ? "float " : "";
    return concat(type, "score, ", gradient_ ? concat(type, "gradient, ") : "");
  }
  std::string memory(std::string_view behind) const {  // declared
    std::string text;
    for (std::size_t i = 0; i < captured().size(); i++)
      text += concat("GLOBAL const ", element_of(call_.captured()[i].dtype).type, "* t", i, behind);
    for (std::size_t i = 0; i < captured().size(); i++)
      if (gradient_ && captured()[i].type == 'f') text += concat("GRADIENT d", i, behind);
    return text;
  }
  std::string result() { return concat("  return ", current_[{Rate::tile, memory_of_result()}], ";\n"); }
  int memory_of_result() const { return gradient_ ? kGradientMemory : kScoreMemory; }

  void steps(Stage first, Stage last) {
    for (int at = plan_.begin[static_cast<int>(first)]; at < plan_.begin[static_cast<int>(last) + 1]; at++)
      step(plan_.steps[at]);
  }

  std::string operand(ScoreOperand place) {
    if (place.rate != Rate::constant) return current_[{place.rate, place.at}];
    return literal(plan_.constants[place.at].type, plan_.constants[place.at].bits);
  }

  // Prints "const Long i3_0 = ..": the checked indices of a step; returns "i3_0 < 0 || .." for them.
  std::string indices(const ScoreStep& step, int first, std::string_view indent) {
    std::string outside;
    for (int j = first; j < step.operand_count; j++) {
      const int dim = j - first;
      text_ += concat(indent, "const Long i", count_, "_", dim, " = checked_index(", operand(step.operands[j]),
                      ", layout[", size_at(step.immediate, dim), "], ", step.immediate, ", ", dim, ", fault);\n");
      outside += concat(dim ? " || i" : "i", count_, "_", dim, " < 0");
    }
    return outside;
  }
  int64_t size_at(int64_t tensor, int dim) const { return layout_at(captured(), tensor) + dim; }

  void gather(const ScoreStep& step) {
    const std::string outside = indices(step, 0, "  ");
    const int rank = captured()[step.immediate].rank;
    std::string at = rank ? "" : "0";
    for (int dim = 0; dim < rank; dim++)
      at += concat(dim ? " + i" : "i", count_, "_", dim, " * layout[", size_at(step.immediate, dim) + rank, "]");
    const Element element = element_of(call_.captured()[step.immediate].dtype);
    const std::string value = concat(element.before, "element(t", step.immediate, ", ", at, ")", element.after);
    define(step, outside.empty() ? value : concat(outside, " ? 0 : ", value));
  }

  void scatter_add(const ScoreStep& step) {
    const int rank = captured()[step.immediate].rank;
    text_ += concat("  if (d", step.immediate, ") {\n");
    const std::string outside = indices(step, 1, "    ");
    std::string at = rank ? concat("i", count_, "_0") : "0";
    for (int dim = 1; dim < rank; dim++)
      at = concat("(", at, ") * layout[", size_at(step.immediate, dim), "] + i", count_, "_", dim);
    const std::string inside = outside.empty() ? "" : concat("if (!(", outside, ")) ");
    text_ += concat("    ", inside, "add_to(d", step.immediate, " + ", at, ", ", operand(step.operands[0]),
                    ");\n  }\n");
    count_++;
  }

  void step(const ScoreStep& step) {
    if (step.op == number_of<score::Gather>()) return gather(step);
    if (step.op == number_of<ScatterAdd>()) return scatter_add(step);
    std::string operands[3];
    for (int j = 0; j < step.operand_count; j++) operands[j] = operand(step.operands[j]);
    if (divides_ints(step.op)) text_ += concat("  if (", operands[1], " == 0) note_fault(fault, -1, 0, 0);\n");
    switch (step.op) {
      case number_of<B>(): return define(step, "b");
      case number_of<H>(): return define(step, "h");
      case number_of<Q>(): return define(step, "q");
      case number_of<K>(): return define(step, "k");
      case number_of<KMinusQ>(): return define(step, "wrapped(bits_of(k) - bits_of(q))");
      case number_of<Sum>(): return define(step, operands[0]);  // each score adds its share
      default: return define(step, with_operands(kTexts[step.op], operands));
    }
  }

  void define(const ScoreStep& step, std::string_view value) {
    const std::string name = concat(object_, "v", count_);
    if (members_) *members_ += concat("  ", type_name(step.type), " v", count_, ";\n");
    text_ += concat("  ", members_ ? "" : concat("const ", type_name(step.type), " "), name, " = ", value, ";\n");
    current_[{step.out.rate, step.out.at}] = name;
    count_++;
  }

  const ScoreCall& call_;
  const ScoreProgram& program_;
  bool gradient_;
  const ScorePlan& plan_;
  std::map<std::pair<Rate, int32_t>, std::string> current_;  // current variable of a register of the plan
  int count_ = 0;
  std::string text_;
  std::string* members_ = nullptr;  // declares values there, as members of an object
  std::string object_;              // followed by a dot
};

}  // namespace

std::string score_source_prelude(SourceLanguage language, bool adds) {
  const bool cuda = language == SourceLanguage::cuda;
  std::string text = cuda ? "" : "#pragma OPENCL FP_CONTRACT OFF\n";
  for (const Word& word : kWords)
    if (adds || (word.name != "GRADIENT" && word.name != "tanh_of(a)"))
      text += concat("#define ", word.name, " ", cuda ? word.cuda : word.opencl, "\n");
  for (std::string_view shared : kShared) text += concat("DEVICE ", shared, "\n");
  return concat(text, adds ? kNoteFault.substr(1) : "", kPrelude.substr(1), !adds ? "" : cuda ? kAddCuda : kAddOpencl);
}

std::string score_source(const ScoreCall& call, SourceLanguage language, bool gradient) {
  std::string text;
  for (int i = 0; i < call.captured_count(); i++)
    if (language == SourceLanguage::opencl && call.captured()[i].dtype == DType::float64)
      text = "#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n";
  return text + Printer(call, gradient).print_function();
}

std::string score_struct(const ScoreCall& call, bool gradient) { return Printer(call, gradient).print_struct(); }

}  // namespace lowbit
