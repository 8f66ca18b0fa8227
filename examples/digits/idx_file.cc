#include "examples/digits/idx_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ddp::examples {
namespace {

constexpr uint8_t kUnsignedByte = 0x08;

uint32_t BigEndian(const std::string& bytes, size_t offset) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[offset + i]);
  return value;
}

}  // namespace

absl::StatusOr<IdxFile> IdxFile::Read(const std::string& path, int dimensions) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  if (!file || !(bytes << file.rdbuf())) {
    const std::string reason = errno == 0 ? "it is empty or cannot be read" : std::strerror(errno);
    return absl::NotFoundError(absl::StrCat("cannot read ", path, ": ", reason));
  }
  return Parse(path, bytes.str(), dimensions);
}

absl::StatusOr<IdxFile> IdxFile::Parse(const std::string& name, const std::string& bytes,
                                       int dimensions) {
  const auto error = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is not usable: ", what));
  };
  const size_t header = 4 + 4 * static_cast<size_t>(dimensions);
  if (bytes.size() < header) {
    return error(absl::StrCat("it has ", bytes.size(), " bytes, the header alone needs ", header));
  }
  if (bytes[0] != 0 || bytes[1] != 0 || static_cast<uint8_t>(bytes[2]) != kUnsignedByte) {
    return error("it does not begin like an IDX file of unsigned bytes");
  }
  if (static_cast<uint8_t>(bytes[3]) != dimensions) {
    return error(absl::StrCat("it has ", static_cast<uint8_t>(bytes[3]), " dimensions instead of ",
                              dimensions));
  }
  IdxFile file;
  const uint64_t present = bytes.size() - header;
  uint64_t expected = 1;
  for (int d = 0; d < dimensions; ++d) {
    const uint32_t size = BigEndian(bytes, 4 + 4 * static_cast<size_t>(d));
    if (size == 0) return error(absl::StrCat("dimension ", d, " is 0"));
    // Checked before the product can overflow: no valid size exceeds the bytes present.
    if (size > present || expected > present / size) {
      return error(absl::StrCat("the header promises more than the ", present,
                                " values that follow it; it may be truncated"));
    }
    expected *= size;
    file.shape.push_back(size);
  }
  if (expected != present) {
    return error(
        absl::StrCat("the header promises ", expected, " values, and ", present, " follow it"));
  }
  file.values.assign(bytes.begin() + static_cast<int64_t>(header), bytes.end());
  return file;
}

}  // namespace ddp::examples
