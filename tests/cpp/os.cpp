// SPDX-License-Identifier: Apache-2.0
// What lowbit asks of the system (csrc/core/os.hpp). Started by tests/cpp/test_os.py, on Linux and for Windows under wine:
//   os FOLDER LIBRARY FUNCTION OTHER: a folder for files; a library that is loaded, one of its functions, and one that is not
//   os fault: touches memory without access, and ends by it
#include "core/os.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

using namespace lowbit;

namespace {

constexpr std::size_t kPage = 4096;

void require(bool holds, const char* what, const std::string& got = "") {
  if (holds) return;
  std::printf("%s: '%s'\n", what, got.c_str());
  std::exit(1);
}

std::string content(const std::string& path) {
  std::ifstream file(std::filesystem::path(path), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void libraries(const char* name, const char* function, const char* other) {
  void* const library = os::loaded_library(name);
  require(library, "a library that every program has is not found", name);
  void* const code = os::find_symbol(library, function);
  require(code && os::find_symbol(nullptr, function), "a function of it is not found", function);
  require(!os::find_symbol(library, "lowbit_no_such_name"), "a function that does not exist is found");
  require(os::file_of(code) == os::path_of_library(library), "the library of a function", os::file_of(code));
  require(os::file_of(&kPage) != os::file_of(code), "a constant of the program is in the library");
  require(os::file_of(&library).empty(), "a variable is in a library", os::file_of(&library));

  require(!os::loaded_library(other), "a library is loaded before it is opened", other);
  const uint64_t before = os::libraries_loaded();
  require(before > 0 && os::libraries_loaded() == before, "the number of libraries changes by itself");
  require(os::open_library(other), "a library of the system does not open", os::why_not_opened());
  require(os::libraries_loaded() > before && os::loaded_library(other), "an opened library is not counted", other);
  require(!os::open_library("no_such_library") && !os::why_not_opened().empty(), "no reason why a library is not opened");
}

std::atomic<int> word{0};
uint32_t number_of_other = 0;
os::Semaphore* semaphore = nullptr;

void threads(const char* program) {
  require(os::cores() > 0 && os::process_number() > 0, "cores and process");
  require(!os::host_name().empty(), "the name of the machine");
  const std::string name = std::filesystem::path(program).filename().string();
  require(os::command_line().find(name) != std::string::npos, "the command line has not the program", os::command_line());
  std::thread other([] {
    number_of_other = os::thread_number();
    while (word != 1) os::sleep_while(word, 0);
    word = 2, os::wake(word);
  });
  word = 1, os::wake(word);
  while (word != 2) os::sleep_while(word, 1);
  other.join();
  require(number_of_other != os::thread_number(), "two threads of one number");
  os::Semaphore posted;
  posted.wait(1000000);  // nobody posts: it returns by itself
  semaphore = &posted;
  os::start_thread_without_signals([] { word = 3, semaphore->post(); });
  while (word != 3) posted.wait(1000000000);
}

void memory() {
  constexpr std::size_t bytes = 512 << 20, part = 16 * kPage;
  char* const data = static_cast<char*>(os::reserve_memory(bytes));
  require(data, "no address space", os::last_error());
  char* const end = data + bytes - part;
  require(os::allow_access(end, part), "no access", os::last_error());
  for (std::size_t i = 0; i < part; i++) require(end[i] == 0, "new memory is not zero");
  std::memset(end, 7, part);
  require(os::forbid_access(end, part) && os::allow_access(end, part), "access back and forth", os::last_error());
  for (std::size_t i = 0; i < part; i++) require(end[i] == 7, "memory lost its values");
  os::discard(end, part);
  std::memset(end, 8, part);
  require(end[0] == 8 && end[part - 1] == 8, "discarded memory cannot be written");
}

void files(const std::string& folder) {
  const std::string inside = folder + "/b\xc3\xbc" "cher", path = inside + "/ring";
  require(os::map_new_file(path, kPage).reason.find(path) != std::string::npos, "no reason with the path of a file");
  for (int i = 0; i < 2; i++)
    require(os::make_folder(inside, true).empty(), "a folder is not made", os::make_folder(inside, true));
  std::string bad = os::write_file(path, {"left by ", "a process that ended"});
  require(bad.empty() && content(path) == "left by a process that ended", "a file is not written", bad);
  require(!os::is_held(path), "a file that nobody has open is held");
  require(!os::make_folder(path, true).empty(), "a file is taken for a folder");
  require(!os::write_file(inside, {"x"}).empty(), "a folder is written");

  os::MappedFile file = os::map_new_file(path, 3 * kPage);
  require(file.data && file.path == path, "a file is not mapped", file.reason);
  char* const data = static_cast<char*>(file.data);
  for (std::size_t i = 0; i < 3 * kPage; i++) require(data[i] == 0, "a new file is not of zeros");
  std::memcpy(data + 2 * kPage, "written", 7);
  require(content(path).size() == 3 * kPage && content(path).compare(2 * kPage, 7, "written") == 0, "others cannot read it");
  require(os::is_held(path), "a mapped file is not held");
  os::remove_file(file);
  require(!std::filesystem::exists(std::filesystem::path(path)), "a removed file is there");
  require(!os::folder_of_this_user().empty(), "no folder of the user");
}

[[noreturn]] void fault() {
  char* const data = static_cast<char*>(os::reserve_memory(kPage));
  static const void* touched = nullptr;
  touched = data + 5;
  os::on_fault([](const void* address) { os::say(address == touched ? "touched\n" : "another address\n"); });
  *static_cast<volatile char*>(data + 5) = 1;
  std::puts("memory without access was written");
  std::exit(0);
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(arguments[1], "fault") == 0) fault();
  require(count == 5, "os FOLDER LIBRARY FUNCTION OTHER");
  libraries(arguments[2], arguments[3], arguments[4]);
  threads(arguments[0]);
  memory();
  files(arguments[1]);
  std::puts("the system does what is asked");
}
