/*
 * Lets the tests run under sanitizers. Each function in this file replaces the library function of
 * the same name, also for calls from shared libraries.
 */
#if defined(__SANITIZE_THREAD__)

int rand_r(unsigned int *seed);

/* Criterion shares memory with its test processes at the address 0x200000000000 + 2^24 * rand_r().
 * ThreadSanitizer nearly always has its own tables at such an address, so that no test could start.
 * This function returns numbers whose addresses ThreadSanitizer leaves to programs (x86-64:
 * 0x550000000000 to 0x568000000000), above the program itself. */
int rand_r(unsigned int *seed) {
  const int first = (0x567000000000 - 0x200000000000) >> 24;
  *seed = *seed * 1103515245U + 12345U; /* the example generator of the C standard */
  return first + (int)(*seed >> 16 & 0x3ff);
}

#elif defined(__SANITIZE_ADDRESS__)

int dlclose(void *handle);

/* MPI unloads its modules in MPI_Finalize. This function keeps them loaded. The leak checker can
 * then report the modules' leaks by name, and lsan.supp can suppress them without suppressing
 * ours. */
int dlclose(void *handle) { return handle ? 0 : -1; }

#else
typedef int ob_support_sanitizers_are_not_needed;
#endif
