#ifndef DDP_TESTING_FUZZ_TARGET_H_
#define DDP_TESTING_FUZZ_TARGET_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

// A fuzz target defines the first two functions in `<stem>_fuzz.cc`, beside the code that it
// fuzzes. Its BUILD file names it by ddp_cc_fuzz. Each target then has two programs:
//
//   <stem>_fuzz       runs under libFuzzer (`tools/test --fuzz`), which makes up inputs
//   <stem>_fuzz_test  runs the seeds, their prefixes and their neighbours, with every compiler
//
// All functions: thread-compatible.
namespace ddp::testing {

// Gives `input`, which may be any bytes, to the code under test. Fails by CHECK, or by a sanitizer.
// Must be deterministic: the input alone decides what the code under test does.
void FuzzOne(absl::string_view input);

// Returns valid inputs from which libFuzzer starts. Together they reach every branch that accepts.
std::vector<std::string> FuzzSeeds();

// Reads numbers and bytes from the start of an input. After the input's end it reads zeros.
class FuzzInput {
 public:
  explicit FuzzInput(absl::string_view bytes) : rest_(bytes) {}

  uint8_t TakeByte() { return static_cast<uint8_t>(TakeNumber(1)); }
  // Takes 8 bytes, little-endian.
  uint64_t TakeNumber() { return TakeNumber(8); }
  // Takes `size` bytes, or fewer at the end of the input.
  absl::string_view TakeBytes(size_t size);
  // The bytes not yet taken.
  absl::string_view rest() const { return rest_; }

 private:
  uint64_t TakeNumber(size_t bytes);

  absl::string_view rest_;
};

// Returns the bytes from which FuzzInput::TakeNumber() reads `number`, for seeds.
std::string FuzzNumber(uint64_t number);

// Cuts `bytes` into pieces of 1 to 32 bytes, as a socket may deliver them; `seed` decides where.
// Each piece has memory of its own and exact size, so that a sanitizer sees a read beyond it.
std::vector<std::vector<char>> FuzzPieces(absl::string_view bytes, uint8_t seed);

// Returns true when `text` is one printable line: not empty, without control characters.
bool IsOneLine(absl::string_view text);

}  // namespace ddp::testing

#endif  // DDP_TESTING_FUZZ_TARGET_H_
