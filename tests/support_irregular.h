/* Objects that stand where a file should be; a reader must not wait for them. */
#ifndef ONEBIT_TESTS_SUPPORT_IRREGULAR_H
#define ONEBIT_TESTS_SUPPORT_IRREGULAR_H

enum irregular { A_FIFO, A_SOCKET, A_DIRECTORY, A_DEVICE, A_LINK_TO_A_FIFO, IRREGULARS };

extern const char *const irregular_names[IRREGULARS];

/* Makes one at that path, which must be free; and removes it. */
void irregular_make(enum irregular kind, const char *path);
void irregular_remove(enum irregular kind, const char *path);

#endif
