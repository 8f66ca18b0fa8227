// The main program of a <stem>_fuzz_test: runs the target's seeds, each prefix of a seed, and each
// seed with one byte changed. An input that fails is shown, escaped as in C.
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "testing/fuzz_target.h"

namespace {

// Current input, for the signal handler.
const std::string* current = nullptr;

// Calls only what a signal handler may call.
void ShowInput(int signal) {
  constexpr char kDigits[] = "0123456789abcdef";
  constexpr char kHead[] = "The input that fails: ";
  (void)!write(STDERR_FILENO, kHead, sizeof(kHead) - 1);
  for (const char c : *current) {
    const auto byte = static_cast<unsigned char>(c);
    const std::array<char, 4> text = {'\\', 'x', kDigits[byte / 16], kDigits[byte % 16]};
    const bool is_plain = byte >= 0x20 && byte < 0x7f && c != '\\';
    (void)!write(STDERR_FILENO, is_plain ? &c : text.data(), is_plain ? 1 : text.size());
  }
  (void)!write(STDERR_FILENO, "\n", 1);
  (void)::signal(signal, SIG_DFL);
  (void)::raise(signal);
}

void Run(const std::string& input) {
  current = &input;
  ddp::testing::FuzzOne(input);
}

}  // namespace

int main() {
  for (const int signal : {SIGABRT, SIGSEGV}) {
    struct sigaction action {};
    // A sanitizer's own handler prints more.
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    (void)::signal(signal, &ShowInput);
  }
  size_t inputs = 0;
  for (const std::string& seed : ddp::testing::FuzzSeeds()) {
    Run(seed);
    for (size_t i = 0; i < seed.size(); ++i) {
      Run(seed.substr(0, i));
      for (const char change : {'\x01', '\x80', '\x11'}) {
        std::string changed = seed;
        changed[i] = static_cast<char>(changed[i] ^ change);
        Run(changed);
      }
    }
    inputs += 1 + 4 * seed.size();
  }
  std::printf("%zu inputs\n", inputs);
  return inputs == 0 ? 1 : 0;
}
