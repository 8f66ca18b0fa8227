#ifndef DDP_LAUNCHER_OUTPUT_PRINTABLE_H_
#define DDP_LAUNCHER_OUTPUT_PRINTABLE_H_

#include <string>

namespace ddp::launcher {

// Returns `text` with a question mark for every byte that is not printable ASCII. Text from the
// store or a worker must neither steer a terminal nor break a format of lines.
inline std::string Printable(std::string text) {
  for (char& byte : text) {
    if (byte < ' ' || byte > '~') byte = '?';  // negative from 0x80 on where char is signed
  }
  return text;
}

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_PRINTABLE_H_
