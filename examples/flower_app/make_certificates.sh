#!/usr/bin/env bash
# Create what a TLS federation with authenticated nodes needs: a CA, the SuperLink's certificate and one key per node.
#   ./make_certificates.sh FOLDER NODES [HOST ...]
# HOST is a name or IP address by which nodes reach the SuperLink; localhost and 127.0.0.1 are always included.
set -euo pipefail
umask 077
folder=${1:?usage: make_certificates.sh FOLDER NODES [HOST ...]}
nodes=${2:?usage: make_certificates.sh FOLDER NODES [HOST ...]}
shift 2
mkdir -p "$folder"
cd "$folder"
if [ -e ca.key ]; then
    echo "$folder already holds certificates: remove it, or name another folder" >&2
    exit 1
fi
names="DNS:localhost,IP:127.0.0.1"
for host in "$@"; do
    if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then names+=",IP:$host"; else names+=",DNS:$host"; fi
done
openssl ecparam -name prime256v1 -genkey -noout -out ca.key
openssl req -x509 -new -key ca.key -sha256 -days 365 -subj "/CN=federation CA" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" -out ca.crt
openssl ecparam -name prime256v1 -genkey -noout -out server.key
openssl req -new -key server.key -subj "/CN=superlink" -out server.csr
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\nkeyUsage=digitalSignature\nbasicConstraints=CA:FALSE\n' \
    "$names" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -sha256 \
    -extfile server.ext -out server.crt 2> /dev/null
rm server.csr server.ext
for ((node = 0; node < nodes; node++)); do
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "node $node" -f "node$node"
done
chmod 644 ca.crt server.crt ./*.pub
echo "created in $folder: ca.crt (for everyone), server.crt and server.key (SuperLink), node0 ... (one for each node)"
echo "keep ca.key off the network: anyone who has it can impersonate your SuperLink"
