#ifndef DDP_COMM_CHECK_OPERATION_NAME_H_
#define DDP_COMM_CHECK_OPERATION_NAME_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace ddp::internal {

// The purpose of an operation, as error messages and TORCH_DISTRIBUTED_DEBUG=DETAIL show it: "the
// all-reduce of gradient bucket 3". A value. Only ToString() builds the text, so a name made of a
// literal allocates nothing. The constructors are implicit: `AllReduce(t, "a barrier")` and
// `AllReduce(t, {"the all-reduce of gradient bucket", 3})` compile.
class OperationName {
 public:
  // `text` must outlive the name, as a literal does. ToString() omits a negative index.
  OperationName(const char* text, int64_t index = -1)  // NOLINT: implicit on purpose
      : text_(text), index_(index) {}
  OperationName(std::string text)  // NOLINT: implicit on purpose
      : owned_(std::move(text)) {}

  std::string_view text() const { return text_ == nullptr ? std::string_view(owned_) : text_; }
  int64_t index() const { return index_; }

  std::string ToString() const {
    std::string name(text());
    if (index_ >= 0) name += " " + std::to_string(index_);
    return name;
  }

 private:
  const char* text_ = nullptr;
  int64_t index_ = -1;
  std::string owned_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_CHECK_OPERATION_NAME_H_
