#ifndef DDP_BASE_NAME_LOOKUP_H_
#define DDP_BASE_NAME_LOOKUP_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp {

// Looks up addresses, of a host's name or by a function, on a thread of its own with the name
// "name-lookup". In a broken network a lookup takes many seconds and cannot be interrupted. The
// caller does not block, and may destroy the object early: the detached thread ends when the lookup
// does.
//
// Thread-compatible.
class NameLookup {
 public:
  // Start the lookup. kResourceExhausted: no descriptor or no thread is left. `look` blocks, and
  // owns what it uses.
  using Look = std::function<absl::StatusOr<std::vector<std::string>>()>;
  static absl::StatusOr<std::unique_ptr<NameLookup>> Start(const std::string& host);
  static absl::StatusOr<std::unique_ptr<NameLookup>> Start(Look look);
  ~NameLookup();
  NameLookup(const NameLookup&) = delete;
  NameLookup& operator=(const NameLookup&) = delete;

  // Returns a descriptor that is readable once the lookup is done.
  int fd() const;
  bool done() const;

  // Returns the result of `look`. That of a host's name is numeric addresses, at least one.
  // kUnavailable: the name has no address now; the message has the reason. CHECKs done().
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
