/*
 * Lets the tests run under sanitizers. Each function here is found before the library function of
 * that name, also by shared libraries.
 */
#if defined(__SANITIZE_THREAD__)

int rand_r(unsigned int *seed);

/* Criterion shares memory with its test processes at the address 0x200000000000 + 2^24 * rand_r(),
 * which nearly always falls where ThreadSanitizer keeps its own tables, and then no test starts.
 * These numbers give addresses in the one part of that range that ThreadSanitizer leaves to
 * programs (x86-64: 0x550000000000 to 0x568000000000), above where the program itself is. */
int rand_r(unsigned int *seed) {
  const int first = (0x567000000000 - 0x200000000000) >> 24;
  *seed = *seed * 1103515245U + 12345U; /* the example generator of the C standard */
  return first + (int)(*seed >> 16 & 0x3ff);
}

#elif defined(__SANITIZE_ADDRESS__)

int dlclose(void *handle);

/* MPI unloads its modules in MPI_Finalize. They are kept loaded here, so that the leak checker
 * reports their leaks by name, and lsan.supp can tell them from ours. */
int dlclose(void *handle) { return handle ? 0 : -1; }

#else
typedef int ob_support_sanitizers_are_not_needed;
#endif
