#ifndef DDP_BASE_NAME_LOOKUP_H_
#define DDP_BASE_NAME_LOOKUP_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp {

// Looks up the addresses of a host's name, on a thread of its own with the name "name-lookup". In a
// broken network a lookup takes many seconds and cannot be interrupted. The caller does not block,
// and may destroy the object early: the detached thread ends when the lookup does.
//
// Thread-compatible.
class NameLookup {
 public:
  // Starts the lookup. kResourceExhausted: no descriptor or no thread is left.
  static absl::StatusOr<std::unique_ptr<NameLookup>> Start(const std::string& host);
  ~NameLookup();
  NameLookup(const NameLookup&) = delete;
  NameLookup& operator=(const NameLookup&) = delete;

  // Returns a descriptor that is readable once the lookup is done.
  int fd() const;
  bool done() const;

  // Returns numeric addresses, at least one. kUnavailable: the name has no address now; the message
  // has the reason. CHECKs done().
  absl::StatusOr<std::vector<std::string>> Result() const;

 private:
  struct State;
  explicit NameLookup(std::shared_ptr<State> state);
  const std::shared_ptr<State> state_;
};

// Returns true when `host` is a numeric IPv4 or IPv6 address.
bool IsNumericAddress(const std::string& host);

}  // namespace ddp

#endif  // DDP_BASE_NAME_LOOKUP_H_
