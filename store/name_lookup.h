#ifndef DDP_STORE_NAME_LOOKUP_H_
#define DDP_STORE_NAME_LOOKUP_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::store {

// Asks for the addresses of a host's name on a thread of its own ("name-lookup"): where the network
// is broken that takes many seconds, and it cannot be cut short. Whoever asks goes on meanwhile,
// and may lose interest: then the thread ends by itself, later.
//
// Thread-compatible.
class NameLookup {
 public:
  // kResourceExhausted: no descriptor or no thread is left.
  static absl::StatusOr<std::unique_ptr<NameLookup>> Start(const std::string& host);
  ~NameLookup();
  NameLookup(const NameLookup&) = delete;
  NameLookup& operator=(const NameLookup&) = delete;

  // Readable once the answer is there.
  int fd() const;
  bool done() const;

  // The answer: addresses as numbers, at least one. kUnavailable: the name has none now; says why.
  // Call it when done().
  absl::StatusOr<std::vector<std::string>> Result() const;

 private:
  struct State;
  explicit NameLookup(std::shared_ptr<State> state);
  const std::shared_ptr<State> state_;
};

// Whether `host` is an address already.
bool IsNumericAddress(const std::string& host);

}  // namespace ddp::store

#endif  // DDP_STORE_NAME_LOOKUP_H_
