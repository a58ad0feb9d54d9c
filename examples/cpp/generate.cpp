// SPDX-License-Identifier: Apache-2.0
// Generate text with a model that export.py compiled, without Python: the prompt in one call, then one token in each,
// the likeliest. Prints the new tokens, and how many were computed in a second.
//   generate MODEL.pt2 COUNT TOKEN...
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <lowbit/torch.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

class Model {
 public:
  explicit Model(const char* path) : package_(path), context_(std::stoll(package_.get_metadata().at("context"))) {}

  // The likeliest token behind `tokens`, which join those of the calls before.
  int64_t next(std::vector<int64_t> tokens) {
    const auto count = static_cast<int64_t>(tokens.size());
    if (count < 1 || length_ + count > context_)
      throw std::invalid_argument("the model was compiled for 1 to " + std::to_string(context_) + " tokens, got " +
                                  std::to_string(length_ + count));
    const at::Tensor ids = at::tensor(tokens).unsqueeze(0);
    const at::Tensor logits = package_.run({ids, at::arange(length_, length_ + count)}).at(0);
    length_ += count;
    return logits[0][-1].argmax().item<int64_t>();
  }

 private:
  torch::inductor::AOTIModelPackageLoader package_;
  int64_t context_, length_ = 0;
};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void generate(const char* path, int count, const std::vector<int64_t>& prompt) {
  if (lowbit_register_torch() != LOWBIT_OK) throw std::runtime_error(lowbit_last_error());
  const c10::InferenceMode inference;
  Model model(path);
  auto begin = std::chrono::steady_clock::now();
  int64_t token = model.next(prompt);
  const double of_prompt = seconds_since(begin);
  begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; i++) {
    std::printf("%lld ", static_cast<long long>(token));
    token = model.next({token});
  }
  std::printf("\nprompt: %.0f tokens/s\nanswer: %.0f tokens/s\n", static_cast<double>(prompt.size()) / of_prompt,
              count / seconds_since(begin));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: generate MODEL.pt2 COUNT TOKEN...\n");
    return 2;
  }
  try {
    std::vector<int64_t> prompt;
    for (int i = 3; i < argc; i++) prompt.push_back(std::stoll(argv[i]));
    generate(argv[1], std::stoi(argv[2]), prompt);
    return 0;
  } catch (const c10::Error& error) {  // torch's own, whose what() has a backtrace
    std::fprintf(stderr, "generate: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "generate: %s\n", error.what());
  }
  return 1;
}
