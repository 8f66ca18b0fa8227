// What ThreadSanitizer reports of right programs. --config=tsan builds each test with this file.

// Debian's libabsl_status is not instrumented, so the count of a status' users seems unordered: two
// threads that each copy a status with a text and let their copies go are reported.
extern "C" const char* __tsan_default_suppressions() { return "race:absl::*Status::Unref\n"; }
