/*
 * A tool that knows MPI_T and nothing of onebit, for tests/scripts/check-preload. Rank 0 prints.
 *   variables list           all performance variables and categories, as they are after MPI_Init
 *   variables early          the same, having looked at all of them before MPI_Init too
 *   variables watch PREFIX   values of those with such a name, before and after some collectives
 *   variables wrong PREFIX   does with them what may not be done, and checks what it is told
 */
#include <mpi.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 20000, STEPS = 40, MOST = 1000, TEXT = 200 };

struct variable {
  char name[TEXT], words[TEXT];
  int code, verbosity, class, bind, readonly, continuous, atomic;
  MPI_Datatype datatype;
  MPI_T_enum values;
};

static int rank, bad;

static void expect(const char *what, int is, int wanted) {
  if (is == wanted)
    return;
  fprintf(stderr, "rank %d: %s is %d and not %d\n", rank, what, is, wanted);
  bad = 1;
}

static void expect_text(const char *what, const char *is, const char *wanted) {
  if (!strcmp(is, wanted))
    return;
  fprintf(stderr, "rank %d: %s is \"%s\" and not \"%s\"\n", rank, what, is, wanted);
  bad = 1;
}

static int number(void) {
  int num = -1;
  expect("MPI_T_pvar_get_num", MPI_T_pvar_get_num(&num), MPI_SUCCESS);
  return num;
}

static struct variable ask(int index) {
  struct variable v = {.class = -1};
  int length = TEXT, more = TEXT;
  v.code =
      MPI_T_pvar_get_info(index, v.name, &length, &v.verbosity, &v.class, &v.datatype, &v.values,
                          v.words, &more, &v.bind, &v.readonly, &v.continuous, &v.atomic);
  if (v.code != MPI_SUCCESS) /* of a component that MPI has closed */
    strcpy(v.name, "(none)");
  else
    expect("length of a name", length, (int)strlen(v.name) + 1);
  return v;
}

static const char *class_name(int class) {
  return class == MPI_T_PVAR_CLASS_COUNTER   ? "counter"
         : class == MPI_T_PVAR_CLASS_TIMER   ? "timer"
         : class == MPI_T_PVAR_CLASS_GENERIC ? "generic"
                                             : "other";
}

/* ---- list, early ---- */

static void list_categories(void) {
  int categories = 0, indices[MOST];
  expect("MPI_T_category_get_num", MPI_T_category_get_num(&categories), MPI_SUCCESS);
  for (int c = 0; c < categories; c++) {
    char name[TEXT];
    int length = TEXT, within = 0;
    /* Other codes are of a component that MPI has closed. */
    if (MPI_T_category_get_info(c, name, &length, NULL, NULL, NULL, &within, NULL) != MPI_SUCCESS ||
        MPI_T_category_get_pvars(c, MOST, indices) != MPI_SUCCESS)
      continue;
    for (int i = 0; i < within && i < MOST; i++)
      printf("category %s: %s\n", name, ask(indices[i]).name);
  }
}

static void list(void) {
  int num = number();
  for (int i = 0; i < num; i++) {
    struct variable v = ask(i);
    int index = -1;
    printf("%d %s class %d, %d %d %d %d %d: %s\n", i, v.name, v.class, v.verbosity, v.bind,
           v.readonly, v.continuous, v.atomic, v.words);
    if (v.code != MPI_SUCCESS)
      continue;
    expect("MPI_T_pvar_get_index", MPI_T_pvar_get_index(v.name, v.class, &index), MPI_SUCCESS);
    expect("the index of a name", index, i);
  }
  list_categories();
}

static struct variable first[MOST];
static int firsts;

static void look_early(void) {
  firsts = number() < MOST ? number() : MOST;
  for (int i = 0; i < firsts; i++)
    first[i] = ask(i);
}

static void look_again(void) {
  if (number() < firsts)
    expect("MPI_T_pvar_get_num, later", number(), firsts);
  for (int i = 0; i < firsts; i++) {
    struct variable v = ask(i);
    if (v.code == MPI_SUCCESS)
      expect_text("the name at an index", v.name, first[i].name);
  }
  list();
}

/* ---- watch ---- */

/* Indices of those with such a name; how many. */
static int find(const char *prefix, int indices[MOST]) {
  int found = 0, num = number();
  for (int i = 0; i < num && found < MOST; i++)
    if (!strncmp(ask(i).name, prefix, strlen(prefix)))
      indices[found++] = i;
  return found;
}

static void sums(void) {
  static float mine[COUNT], sum[COUNT];
  static double wide[COUNT], wider[COUNT];
  for (int step = 0; step < STEPS; step++) {
    int one = 1, all = 0;
    for (int i = 0; i < COUNT; i++)
      mine[i] = (i + step) % 3 ? 1.0F : -1.0F;
    MPI_Allreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  }
  for (int i = 0; i < 3; i++)
    MPI_Allreduce(wide, wider, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  for (int i = 0; i < 2; i++)
    MPI_Allreduce(mine, sum, COUNT, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Allreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_SELF);
}

static double value(MPI_T_pvar_session session, MPI_T_pvar_handle handle, MPI_Datatype datatype) {
  unsigned long long count = 0;
  double real = 0;
  bool counts = datatype == MPI_UNSIGNED_LONG_LONG;
  expect("counts or seconds", counts || datatype == MPI_DOUBLE, 1);
  expect("MPI_T_pvar_read",
         MPI_T_pvar_read(session, handle, counts ? (void *)&count : (void *)&real), MPI_SUCCESS);
  return counts ? (double)count : real;
}

static void watch(const char *prefix) {
  static MPI_T_pvar_handle handle[MOST];
  static double before[MOST];
  MPI_T_pvar_session session;
  int indices[MOST], count, found = find(prefix, indices);
  MPI_T_pvar_session_create(&session);
  for (int i = 0; i < found; i++) {
    expect("MPI_T_pvar_handle_alloc",
           MPI_T_pvar_handle_alloc(session, indices[i], NULL, &handle[i], &count), MPI_SUCCESS);
    expect("the count of a handle", count, 1);
    before[i] = value(session, handle[i], ask(indices[i]).datatype);
  }
  expect("starting all", MPI_T_pvar_start(session, MPI_T_PVAR_ALL_HANDLES), MPI_SUCCESS);
  sums();
  expect("stopping all", MPI_T_pvar_stop(session, MPI_T_PVAR_ALL_HANDLES), MPI_SUCCESS);
  expect("resetting all", MPI_T_pvar_reset(session, MPI_T_PVAR_ALL_HANDLES), MPI_SUCCESS);
  for (int i = 0; i < found; i++) {
    struct variable v = ask(indices[i]);
    double after = value(session, handle[i], v.datatype);
    if (rank == 0)
      printf("%s %s %.9f %.9f\n", v.name, class_name(v.class), before[i], after);
    expect("MPI_T_pvar_handle_free", MPI_T_pvar_handle_free(session, &handle[i]), MPI_SUCCESS);
    expect("a freed handle is null", handle[i] == MPI_T_PVAR_HANDLE_NULL, 1);
  }
  MPI_T_pvar_session_free(&session);
}

/* ---- wrong ---- */

static void wrong_strings(int index) {
  char whole[TEXT], part[TEXT] = "?????????";
  int length = TEXT, full;
  MPI_T_pvar_get_info(index, whole, &length, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                      NULL);
  full = (int)strlen(whole) + 1;
  expect("a whole length", length, full);
  for (length = 4; length >= 0; length -= 4) {
    int given = length;
    MPI_T_pvar_get_info(index, part, &given, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                        NULL);
    expect("a length where there was little room", given, full);
    expect("the part of a name", strncmp(part, whole, 3) || part[3] || part[4] != '?', 0);
  }
  length = 7;
  MPI_T_pvar_get_info(index, NULL, &length, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                      NULL);
  expect("a length alone", length, full);
  strcpy(part, "as it was");
  expect("MPI_T_pvar_get_info of little",
         MPI_T_pvar_get_info(index, part, NULL, NULL, NULL, NULL, NULL, part, NULL, NULL, NULL,
                             NULL, NULL),
         MPI_SUCCESS);
  expect_text("a string without a length", part, "as it was");
}

static void wrong_names(int index) {
  struct variable v = ask(index);
  int found = -7;
  expect("MPI_T_pvar_get_index of another class",
         MPI_T_pvar_get_index(v.name, MPI_T_PVAR_CLASS_STATE, &found), MPI_T_ERR_INVALID_NAME);
  expect("MPI_T_pvar_get_index of no name",
         MPI_T_pvar_get_index("onebit", MPI_T_PVAR_CLASS_COUNTER, &found), MPI_T_ERR_INVALID_NAME);
  expect("the index of no name", found, -7);
}

/* What every use of such a handle says: what it says itself where `code` is MPI_SUCCESS. */
static void use(MPI_T_pvar_session session, MPI_T_pvar_handle handle, int code) {
  unsigned long long room = 77;
  bool fine = code == MPI_SUCCESS;
  expect("MPI_T_pvar_write", MPI_T_pvar_write(session, handle, &room),
         fine ? MPI_T_ERR_PVAR_NO_WRITE : code);
  expect("MPI_T_pvar_reset", MPI_T_pvar_reset(session, handle),
         fine ? MPI_T_ERR_PVAR_NO_WRITE : code);
  expect("MPI_T_pvar_readreset", MPI_T_pvar_readreset(session, handle, &room),
         fine ? MPI_T_ERR_PVAR_NO_ATOMIC : code);
  expect("MPI_T_pvar_start", MPI_T_pvar_start(session, handle),
         fine ? MPI_T_ERR_PVAR_NO_STARTSTOP : code);
  expect("MPI_T_pvar_stop", MPI_T_pvar_stop(session, handle),
         fine ? MPI_T_ERR_PVAR_NO_STARTSTOP : code);
  expect("what nothing was written to", room == 77, 1);
  expect("MPI_T_pvar_read", MPI_T_pvar_read(session, handle, &room), code);
  expect("what something was written to", room == 77, !fine);
}

static void wrong_handles(int index) {
  MPI_T_pvar_session one, other, ended;
  MPI_T_pvar_handle handle, twin, freed;
  int count;
  MPI_T_pvar_session_create(&one);
  MPI_T_pvar_session_create(&other);
  expect("a handle without a session",
         MPI_T_pvar_handle_alloc(MPI_T_PVAR_SESSION_NULL, index, NULL, &handle, &count),
         MPI_T_ERR_INVALID_SESSION);
  MPI_T_pvar_handle_alloc(one, index, NULL, &handle, &count);
  MPI_T_pvar_handle_alloc(one, index, NULL, &twin, &count);
  use(one, handle, MPI_SUCCESS);
  use(other, handle, MPI_T_ERR_INVALID_HANDLE);
  use(MPI_T_PVAR_SESSION_NULL, handle, MPI_T_ERR_INVALID_SESSION);
  expect("freeing it in another session", MPI_T_pvar_handle_free(other, &handle),
         MPI_T_ERR_INVALID_HANDLE);
  freed = handle;
  expect("freeing it", MPI_T_pvar_handle_free(one, &handle), MPI_SUCCESS);
  use(one, freed, MPI_T_ERR_INVALID_HANDLE);
  expect("freeing it again", MPI_T_pvar_handle_free(one, &freed), MPI_T_ERR_INVALID_HANDLE);
  use(one, twin, MPI_SUCCESS);
  ended = one;
  MPI_T_pvar_session_free(&one);
  use(ended, twin, MPI_T_ERR_INVALID_HANDLE);
  MPI_T_pvar_session_free(&other);
}

static void wrong_indices(void) {
  const int wrong[] = {-1, number(), number() + 1000};
  MPI_T_pvar_session session;
  MPI_T_pvar_handle handle;
  int count;
  MPI_T_pvar_session_create(&session);
  for (int i = 0; i < 3; i++) {
    expect("MPI_T_pvar_get_info of no index", ask(wrong[i]).code, MPI_T_ERR_INVALID_INDEX);
    expect("MPI_T_pvar_handle_alloc of no index",
           MPI_T_pvar_handle_alloc(session, wrong[i], NULL, &handle, &count),
           MPI_T_ERR_INVALID_INDEX);
  }
  MPI_T_pvar_session_free(&session);
}

static void wrong(const char *prefix) {
  int indices[MOST], found = find(prefix, indices);
  wrong_indices();
  for (int i = 0; i < found; i++) {
    wrong_strings(indices[i]);
    wrong_names(indices[i]);
    wrong_handles(indices[i]);
  }
  if (rank == 0)
    printf("%d tried\n", found);
}

/* Before MPI_T_init_thread, and after its end. */
static void uninitialised(void) {
  int room = -5;
  MPI_T_pvar_session session;
  MPI_T_pvar_handle handle;
  expect("MPI_T_pvar_get_num without MPI_T", MPI_T_pvar_get_num(&room), MPI_T_ERR_NOT_INITIALIZED);
  expect("MPI_T_pvar_get_info without MPI_T", ask(0).code, MPI_T_ERR_NOT_INITIALIZED);
  expect("MPI_T_pvar_get_index without MPI_T",
         MPI_T_pvar_get_index("onebit_calls", MPI_T_PVAR_CLASS_COUNTER, &room),
         MPI_T_ERR_NOT_INITIALIZED);
  expect("MPI_T_pvar_session_create without MPI_T", MPI_T_pvar_session_create(&session),
         MPI_T_ERR_NOT_INITIALIZED);
  expect("MPI_T_pvar_handle_alloc without MPI_T",
         MPI_T_pvar_handle_alloc(NULL, 0, NULL, &handle, &room), MPI_T_ERR_NOT_INITIALIZED);
  expect("what is written without MPI_T", room, -5);
}

/* A handle that is left when MPI_T ends. */
static MPI_T_pvar_session kept_session;
static MPI_T_pvar_handle kept;

static void keep(const char *prefix) {
  int count, indices[MOST];
  MPI_T_pvar_session_create(&kept_session);
  if (find(prefix, indices))
    MPI_T_pvar_handle_alloc(kept_session, indices[0], NULL, &kept, &count);
}

int main(int argc, char **argv) {
  const char *what = argc > 1 ? argv[1] : "", *prefix = argc > 2 ? argv[2] : "";
  int provided;
  uninitialised();
  MPI_T_init_thread(MPI_THREAD_SINGLE, &provided);
  if (!strcmp(what, "early"))
    look_early();
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (!strcmp(what, "list"))
    list();
  else if (!strcmp(what, "early"))
    look_again();
  else if (!strcmp(what, "watch"))
    watch(prefix);
  else if (!strcmp(what, "wrong"))
    wrong(prefix), keep(prefix);
  else
    bad = 2;
  MPI_T_finalize(); /* Open MPI 4.1 breaks down in it after MPI_Finalize */
  uninitialised();
  if (kept != MPI_T_PVAR_HANDLE_NULL)
    use(kept_session, kept, MPI_T_ERR_NOT_INITIALIZED);
  MPI_Finalize();
  return bad;
}
