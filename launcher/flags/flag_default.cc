#include "launcher/flags/flag_default.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::launcher {
namespace {

std::string Text(const char* text) { return text; }
std::string Text(int number) { return absl::StrCat(number); }
std::string Text(double number) { return absl::StrCat(number); }
std::string Text(InSeconds time) { return absl::StrCat(absl::ToDoubleSeconds(time.value)); }
std::string Text(InMilliseconds time) {
  return absl::StrCat(absl::ToDoubleMilliseconds(time.value));
}
std::string Text(NodeRange range) { return absl::StrCat(range.min, ":", range.max); }
std::string Text(const SignalList& list) {
  return absl::StrJoin(list.signals, ",", [](std::string* out, int signal) {
    out->append(elastic::SignalName(signal));
  });
}

}  // namespace

std::string TextOf(const FlagDefault& value) {
  return std::visit([](const auto& of) { return Text(of); }, value);
}

}  // namespace ddp::launcher
