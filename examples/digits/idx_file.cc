#include "examples/digits/idx_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace ddp::examples {
namespace {

constexpr uint8_t kUnsignedByte = 0x08;

uint32_t BigEndian(const std::string& bytes, size_t offset) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[offset + i]);
  return value;
}

}  // namespace

IdxFile IdxFile::Read(const std::string& path, int dimensions) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  if (!file || !(bytes << file.rdbuf())) {
    const std::string reason = errno == 0 ? "it is empty or cannot be read" : std::strerror(errno);
    throw std::runtime_error("cannot read " + path + ": " + reason);
  }
  return Parse(path, bytes.str(), dimensions);
}

IdxFile IdxFile::Parse(const std::string& name, const std::string& bytes, int dimensions) {
  const auto require = [&](bool condition, const std::string& fault) {
    if (!condition) throw std::runtime_error(name + " is not usable: " + fault);
  };
  const size_t header = 4 + 4 * static_cast<size_t>(dimensions);
  require(bytes.size() >= header, "it has " + std::to_string(bytes.size()) +
                                      " bytes, the header alone needs " + std::to_string(header));
  require(bytes[0] == 0 && bytes[1] == 0 && static_cast<uint8_t>(bytes[2]) == kUnsignedByte,
          "it does not begin like an IDX file of unsigned bytes");
  require(static_cast<uint8_t>(bytes[3]) == dimensions,
          "it has " + std::to_string(static_cast<uint8_t>(bytes[3])) + " dimensions instead of " +
              std::to_string(dimensions));
  IdxFile file;
  const uint64_t present = bytes.size() - header;
  uint64_t expected = 1;
  for (int d = 0; d < dimensions; ++d) {
    const uint32_t size = BigEndian(bytes, 4 + 4 * static_cast<size_t>(d));
    require(size > 0, "dimension " + std::to_string(d) + " is 0");
    // Checked before the product can overflow: no valid size exceeds the bytes present.
    require(size <= present && expected <= present / size,
            "the header promises more than the " + std::to_string(present) +
                " values that follow it; it may be truncated");
    expected *= size;
    file.shape.push_back(size);
  }
  require(expected == present, "the header promises " + std::to_string(expected) + " values, and " +
                                   std::to_string(present) + " follow it");
  file.values.assign(bytes.begin() + static_cast<int64_t>(header), bytes.end());
  return file;
}

}  // namespace ddp::examples
