#ifndef DDP_TESTING_ERROR_OF_H_
#define DDP_TESTING_ERROR_OF_H_

#include <exception>
#include <functional>
#include <string>

namespace ddp::testing {

// Returns the text of the Error that `action` throws. Otherwise returns "no error", or "another
// error: " and its text.
template <typename Error>
std::string ErrorOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    const bool expected = dynamic_cast<const Error*>(&error) != nullptr;
    return std::string(expected ? "" : "another error: ") + error.what();
  }
  return "no error";
}

}  // namespace ddp::testing

#endif  // DDP_TESTING_ERROR_OF_H_
