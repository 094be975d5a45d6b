/* The hash, against the published values of 64-bit FNV-1a: files and messages depend on it. */
#include "base/hash.h"
#include "tests/support.h"

Test(hash, published_values) {
  cr_expect_eq(ob_hash(OB_HASH_START, "", 0), UINT64_C(0xcbf29ce484222325));
  cr_expect_eq(ob_hash(OB_HASH_START, "a", 1), UINT64_C(0xaf63dc4c8601ec8c));
  cr_expect_eq(ob_hash(OB_HASH_START, "foobar", 6), UINT64_C(0x85944171f73967e8));
}

Test(hash, goes_on_where_it_ended) {
  cr_expect_eq(ob_hash(ob_hash(OB_HASH_START, "foo", 3), "bar", 3),
               ob_hash(OB_HASH_START, "foobar", 6));
}
