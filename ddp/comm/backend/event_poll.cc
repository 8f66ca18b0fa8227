#include "ddp/comm/backend/event_poll.h"

#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ddp::internal {
namespace {

bool IsListening(int socket) {
  int value = 0;
  socklen_t size = sizeof(value);
  return ::getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &value, &size) == 0 && value != 0;
}

}  // namespace

std::vector<int> EventPolls() {
  std::vector<int> polls;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
       !error && entry != end; entry.increment(error)) {
    std::error_code gone;  // a descriptor that was closed in the meantime
    int descriptor = -1;
    if (std::filesystem::read_symlink(entry->path(), gone) == "anon_inode:[eventpoll]" &&
        absl::SimpleAtoi(entry->path().filename().string(), &descriptor)) {
      polls.push_back(descriptor);
    }
  }
  std::sort(polls.begin(), polls.end());
  return polls;
}

void ShutDownConnectionsOf(int event_poll) {
  // A line for each descriptor: "tfd: NUMBER events: ...".
  std::ifstream info(absl::StrCat("/proc/self/fdinfo/", event_poll));
  std::string word;
  while (info >> word) {
    if (word != "tfd:") continue;
    int watched = -1;
    if (!(info >> watched)) break;
    // Fails without an effect for what is no connected socket.
    if (!IsListening(watched)) ::shutdown(watched, SHUT_RDWR);
  }
}

}  // namespace ddp::internal
